"""Loading compiled kernels and launching them on torch's streams.

A launch makes no allocation on the device and never synchronises, so it can be captured in a CUDA graph.
What does not change between launches (argument slots, launch configurations) is prepared once per kernel.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from . import driver
from .arguments import Argument, ArgumentPacker
from .cache import compile_kernel
from .source import KernelSource

Dim3: TypeAlias = tuple[int, int, int]
Extent: TypeAlias = int | tuple[int, ...]
_ConfigKey: TypeAlias = tuple[Extent, Extent, Extent | None, int, bool, bool]

MAX_GRID: Dim3 = (2**31 - 1, 65535, 65535)
MAX_BLOCK: Dim3 = (1024, 1024, 64)
# Clusters up to this many blocks run on every GPU that has clusters; larger ones need an opt-in per kernel.
PORTABLE_CLUSTER_BLOCKS = 8
MAX_CLUSTER_BLOCKS = 16
# Above this a block's dynamic shared memory has to be allowed per kernel.
DEFAULT_DYNAMIC_SMEM = 48 * 1024
# Launch configurations kept per kernel. A persistent kernel has one; a grid that follows the data has many.
_CACHED_CONFIGS = 256


@dataclass(frozen=True)
class KernelLimits:
    """What a loaded kernel allows: threads per block, and static and largest total shared memory in bytes."""

    max_threads: int
    static_smem: int
    max_smem: int


@dataclass(frozen=True)
class LaunchShape:
    """A checked launch configuration; ``smem`` is the dynamic shared memory per block in bytes."""

    grid: Dim3
    block: Dim3
    cluster: Dim3 | None
    smem: int
    pdl: bool
    cooperative: bool

    @property
    def cluster_blocks(self) -> int:
        """Blocks of a cluster; 1 without clusters."""
        return 1 if self.cluster is None else math.prod(self.cluster)


def dim3(value: Extent, what: str) -> Dim3:
    """``value`` as three positive integers, missing ones 1.

    Raises:
        ValueError: for more than three numbers or one below 1.
    """
    numbers = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(numbers) <= 3 or any(not isinstance(n, int) or n < 1 for n in numbers):
        raise ValueError(f"{what} {value!r} must be 1 to 3 integers of at least 1")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def check_launch(
    name: str,
    limits: KernelLimits,
    grid: Extent,
    block: Extent,
    cluster: Extent | None,
    smem: int,
    pdl: bool,
    cooperative: bool,
) -> LaunchShape:
    """Check a launch configuration against the hardware and the kernel.

    Raises:
        ValueError: names the kernel, the value and the limit it exceeds.
    """
    grid3 = dim3(grid, f"kernel {name}: grid")
    block3 = dim3(block, f"kernel {name}: block")
    cluster3 = None if cluster is None else dim3(cluster, f"kernel {name}: cluster")
    for what, values, maxima in (("grid", grid3, MAX_GRID), ("block", block3, MAX_BLOCK)):
        for value, maximum, axis in zip(values, maxima, "xyz", strict=True):
            if value > maximum:
                raise ValueError(f"kernel {name}: {what}.{axis} = {value} exceeds {maximum}")
    threads = math.prod(block3)
    if threads > limits.max_threads:
        raise ValueError(
            f"kernel {name}: block {block3} has {threads} threads, the kernel was compiled for at most "
            f"{limits.max_threads}"
        )
    if cluster3 is not None:
        if any(blocks % per_cluster for blocks, per_cluster in zip(grid3, cluster3, strict=True)):
            raise ValueError(f"kernel {name}: grid {grid3} must be a multiple of the cluster {cluster3}")
        if math.prod(cluster3) > MAX_CLUSTER_BLOCKS:
            raise ValueError(
                f"kernel {name}: cluster {cluster3} has {math.prod(cluster3)} blocks, at most "
                f"{MAX_CLUSTER_BLOCKS} are possible"
            )
    if smem < 0 or smem + limits.static_smem > limits.max_smem:
        raise ValueError(
            f"kernel {name}: {smem} bytes of dynamic and {limits.static_smem} of static shared memory per "
            f"block must be within {limits.max_smem} on this GPU"
        )
    return LaunchShape(grid3, block3, cluster3, smem, pdl, cooperative)


def launch_config(shape: LaunchShape) -> Any:
    """The driver's ``CUlaunchConfig`` of ``shape``; needs cuda-python but no driver."""
    api = driver.bindings()
    ids = api.CUlaunchAttributeID
    attributes = []
    if shape.cluster is not None:
        cluster = api.CUlaunchAttribute()
        cluster.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = shape.cluster
        attributes.append(cluster)
    if shape.pdl:
        overlap = api.CUlaunchAttribute()
        overlap.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes.append(overlap)
    if shape.cooperative:
        cooperative = api.CUlaunchAttribute()
        cooperative.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
    config.sharedMemBytes = shape.smem
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


class Kernel:
    """A kernel loaded into one CUDA context; :func:`load_kernel` makes it.

    Attributes:
        name: short name for messages.
        device: number of the CUDA device it runs on.
        resources: registers, spills, shared memory as read from the cubin.
        limits: see :class:`KernelLimits`.
    """

    def __init__(self, source: KernelSource, device: int) -> None:
        cubin = compile_kernel(source)
        self.name = source.name
        self.device = device
        self.resources = cubin.resources
        self._context = driver.primary_context(device)
        self._context_handle = int(self._context)
        self._function = driver.load_function(cubin.data, cubin.symbol, self._context)
        with driver.current_context(self._context):
            self.limits = KernelLimits(
                max_threads=driver.function_attribute(self._function, "MAX_THREADS_PER_BLOCK"),
                static_smem=driver.function_attribute(self._function, "SHARED_SIZE_BYTES"),
                max_smem=driver.device_attribute(device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            )
            sizes = driver.parameter_sizes(self._function)
        self._packer = ArgumentPacker(self.name, sizes, device)
        self._allowed_smem = DEFAULT_DYNAMIC_SMEM
        self._allowed_cluster = PORTABLE_CLUSTER_BLOCKS
        self._configs: dict[_ConfigKey, Any] = {}
        # Argument slots and configurations are reused, and the driver call releases the interpreter lock.
        self._lock = threading.Lock()
        api = driver.driver()
        self._launch, self._get_current = api.cuLaunchKernelEx, api.cuCtxGetCurrent

    def launch(
        self,
        grid: Extent,
        block: Extent,
        args: Sequence[Argument],
        *,
        cluster: Extent | None = None,
        smem: int = 0,
        pdl: bool = False,
        cooperative: bool = False,
        stream: torch.cuda.Stream | int | None = None,
    ) -> None:
        """Launch the kernel; returns at once.

        Args:
            grid, block: blocks per grid and threads per block, an int or a tuple of up to three.
            args: one per kernel parameter: a tensor on this kernel's device (its address), a TensorMap, a
                ctypes scalar or structure (by value), or None (a null pointer). Plain Python numbers have no
                size, so they are refused.
            cluster: blocks per cluster.
            smem: dynamic shared memory per block in bytes.
            pdl: let the kernel start while the one before it in the stream is still finishing; only for
                kernels that call ``cudaGridDependencySynchronize`` before they read its results.
            cooperative: all blocks must be resident at once (needed for grid-wide barriers).
            stream: default torch's current stream on this kernel's device. Tensors used on a stream other
                than the one they were allocated on need ``record_stream``, as everywhere in torch.

        Raises:
            ValueError, TypeError: for a configuration or argument that does not fit, before the launch.
            CudaError: when the driver refuses the launch.
        """
        key = (grid, block, cluster, smem, pdl, cooperative)
        if stream is None:
            handle = _current_raw_stream(self.device)
        else:
            handle = stream if isinstance(stream, int) else stream.cuda_stream
        with self._lock:
            config = self._configs.get(key)
            if config is None:
                config = self._prepare(key)
            pointers = self._packer.pack(args)
            config.hStream = handle
            # The thread may have no context yet (a new one) or that of another device.
            if int(self._get_current()[1]) == self._context_handle:
                status = self._launch(config, self._function, pointers, 0)[0]
            else:
                with driver.current_context(self._context):
                    status = self._launch(config, self._function, pointers, 0)[0]
        if status != 0:
            driver.check(
                (status,),
                f"launch of kernel {self.name} (grid {grid}, block {block}, "
                f"cluster {cluster}, {smem} bytes of dynamic shared memory)",
            )

    def _prepare(self, key: _ConfigKey) -> Any:
        shape = check_launch(self.name, self.limits, *key)
        with driver.current_context(self._context):
            if shape.smem > self._allowed_smem:
                driver.set_function_attribute(self._function, "MAX_DYNAMIC_SHARED_SIZE_BYTES", shape.smem)
                self._allowed_smem = shape.smem
            if shape.cluster_blocks > self._allowed_cluster:
                driver.set_function_attribute(self._function, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
                self._allowed_cluster = MAX_CLUSTER_BLOCKS
        config = launch_config(shape)
        if len(self._configs) >= _CACHED_CONFIGS:
            self._configs.clear()
        self._configs[key] = config
        return config


def _current_raw_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


_kernels: dict[tuple[KernelSource, int, int], Kernel] = {}
_kernels_lock = threading.Lock()


def load_kernel(source: KernelSource, device: torch.device | int | str | None = None) -> Kernel:
    """Compile (through the cache) and load a kernel; the same call later returns the same object.

    Args:
        source: the kernel.
        device: where it will run; default torch's current CUDA device.

    Raises:
        ValueError: for a device that is not a CUDA device.
        CompileError, ToolchainError: from the compiler.
        CudaError: when the driver can't load it.
    """
    index = device_index(device)
    key = (source, index, int(driver.primary_context(index)))
    kernel = _kernels.get(key)
    if kernel is None:
        with _kernels_lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = Kernel(source, index)
    return kernel


def device_index(device: torch.device | int | str | None) -> int:
    """The number of a CUDA device; None is torch's current one.

    Raises:
        ValueError: for a device of another type.
    """
    if isinstance(device, int):
        return device
    if device is None:
        return torch.cuda.current_device()
    resolved = torch.device(device)
    if resolved.type != "cuda":
        raise ValueError(f"kernels run on CUDA devices, got {resolved}")
    return torch.cuda.current_device() if resolved.index is None else resolved.index
