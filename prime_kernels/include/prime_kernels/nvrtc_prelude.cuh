#pragma once

// Included before every translation unit. NVRTC has no host compiler, so the declarations that nvcc takes from the
// host side (launch control, streams) come from here, and the few standard headers come from ../nvrtc_std.

#define __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
#include <cuda_device_runtime_api.h>
#undef __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__
