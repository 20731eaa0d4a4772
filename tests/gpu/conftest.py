"""Settings that CUDA reads once, before anything of it starts: virtual ranks need both.

Their kernels wait for each other on streams of their own. A module that loads lazily would wait for the
kernels that are running, and streams that share a hardware queue would run one after the other.
"""

from __future__ import annotations

import os

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
