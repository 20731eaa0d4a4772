"""Process-wide settings: which backend runs the kernels, on which device, with how many SMs.

Nothing here touches a GPU, so that importing the package never creates a CUDA context.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch

from . import _dropin

BACKENDS = ("auto", "reference", "sm90")
BACKEND_ENV = "PRIME_KERNELS_BACKEND"
DEVICE_ENV = "PRIME_KERNELS_DEVICE"
TIMEOUT_ENV = "PRIME_KERNELS_TIMEOUT_SECONDS"
DEFAULT_TIMEOUT_SECONDS = 300.0
# Nanoseconds of more would not fit into the kernels' 64-bit integers.
MAX_TIMEOUT_SECONDS = 1e9
POOL_CAPACITY_ENV = "PRIME_KERNELS_POOL_CAPACITY_FACTOR"
SYNCHRONOUS_ENV = "PRIME_KERNELS_SYNCHRONOUS_CHECKS"

# The kernel (registry name) that serves a buffer's mma_type, and the compute capability it needs.
_KERNEL_OF_MMA_TYPE = {"bf16xbf16": "mega_moe_bf16"}
_SM90 = (9, 0)

_backend: str | None = None
_device: torch.device | None = None
_num_sms: int | None = None
_timeout_seconds: float | None = None
# Unlike None, this says that the caller has not chosen: None is a choice of its own (room for any routing).
_UNSET = object()
_pool_capacity_factor: object = _UNSET
_synchronous_checks: bool | None = None


def set_backend(name: str) -> None:
    """Choose the backend of buffers built from now on.

    Args:
        name: ``"auto"`` (CPU tensors run the reference, SM90 GPUs run the kernels), ``"reference"``
            (plain torch on any device) or ``"sm90"`` (the kernels, an error anywhere else).

    Raises:
        ValueError: for any other name.
    """
    global _backend
    _backend = _checked_backend(name, "set_backend")


def get_backend() -> str:
    """The name given to :func:`set_backend`, else ``$PRIME_KERNELS_BACKEND``, else ``"auto"``."""
    if _backend is not None:
        return _backend
    return _checked_backend(os.environ.get(BACKEND_ENV) or "auto", f"${BACKEND_ENV}")


def _checked_backend(name: str, source: str) -> str:
    if name not in BACKENDS:
        raise ValueError(f"{source}: unknown backend {name!r}; use one of {', '.join(BACKENDS)}")
    return name


def set_device(device: torch.device | str | None) -> None:
    """Choose the device buffers are allocated on; ``None`` returns to the automatic choice.

    The automatic choice is the device the process group communicates from (gloo alone: CPU; NCCL: the
    current CUDA device), and without a group the current CUDA device where there is one, else the CPU.
    ``$PRIME_KERNELS_DEVICE`` sets the same thing from outside.

    Raises:
        ValueError: for what names no device.
    """
    global _device
    _device = None if device is None else _checked_device(device, "set_device")


def get_device() -> torch.device | None:
    """The device chosen with :func:`set_device` or ``$PRIME_KERNELS_DEVICE``; None is the automatic one."""
    if _device is not None:
        return _device
    name = os.environ.get(DEVICE_ENV)
    return _checked_device(name, f"${DEVICE_ENV}") if name else None


def _checked_device(device: torch.device | str, source: str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{source}: got {device!r}, needs a device such as 'cpu' or 'cuda:0'") from error


def set_num_sms(num_sms: int) -> None:
    """Limit the SMs the persistent kernels occupy; the rest stay free for NCCL and other streams.

    The limit is checked against the GPU's SM count at launch. The reference backend ignores it. It also holds
    for kernels taken from an installed ``deep_gemm``.

    Raises:
        ValueError: when ``num_sms`` is not a positive integer.
    """
    global _num_sms
    if isinstance(num_sms, bool) or not isinstance(num_sms, int) or num_sms < 1:
        raise ValueError(f"set_num_sms: got {num_sms!r}, needs an integer of at least 1 (SMs to use)")
    _num_sms = num_sms
    _dropin.forward_num_sms(num_sms)


def get_num_sms() -> int:
    """The limit set with :func:`set_num_sms`, else all SMs of the current GPU, else 0 on a CPU machine."""
    if _num_sms is not None:
        return _num_sms
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def sm_limit() -> int | None:
    """The limit set with :func:`set_num_sms`, None without one. Asks no device, so it is cheap."""
    return _num_sms


def set_timeout_seconds(seconds: float) -> None:
    """Set how long a rank waits for a peer before it raises.

    Raise it where a first step may be late, for example while one rank compiles its kernels.

    Raises:
        ValueError: when ``seconds`` is not a positive number.
    """
    global _timeout_seconds
    _timeout_seconds = _checked_timeout(seconds, "set_timeout_seconds")


def get_timeout_seconds() -> float:
    """The limit of :func:`set_timeout_seconds`, else ``$PRIME_KERNELS_TIMEOUT_SECONDS``, else 300 s."""
    if _timeout_seconds is not None:
        return _timeout_seconds
    value = os.environ.get(TIMEOUT_ENV)
    return _checked_timeout(value, f"${TIMEOUT_ENV}") if value else DEFAULT_TIMEOUT_SECONDS


def _checked_timeout(value: float | str, source: str) -> float:
    seconds = _number(value)
    if not 0.0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise ValueError(
            f"{source}: got {value!r}, needs a finite number of seconds above 0 and at most "
            f"{MAX_TIMEOUT_SECONDS:g}"
        )
    return seconds


def _number(value: float | str) -> float:
    """NaN, which no limit takes, for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def set_pool_capacity_factor(factor: float | None) -> None:
    """Set how many dispatched rows a rank has room for, for buffers built from now on.

    ``factor`` times the rows of even routing: with T tokens per rank and top-k K, a rank receives T K rows
    when all ranks bring T tokens and all experts are equally loaded. None (the default) has room for any
    routing, which is R T K rows for R ranks. A call whose routing needs more raises a RuntimeError that names
    the rows; no row is ever dropped. Equal on all ranks. The reference backend has no pools.

    Raises:
        ValueError: when ``factor`` is not a finite number above 0.
    """
    global _pool_capacity_factor
    _pool_capacity_factor = None if factor is None else _checked_factor(factor, "set_pool_capacity_factor")


def get_pool_capacity_factor() -> float | None:
    """The factor of :func:`set_pool_capacity_factor`, else $PRIME_KERNELS_POOL_CAPACITY_FACTOR, else None."""
    if _pool_capacity_factor is not _UNSET:
        assert _pool_capacity_factor is None or isinstance(_pool_capacity_factor, float)
        return _pool_capacity_factor
    value = os.environ.get(POOL_CAPACITY_ENV)
    return _checked_factor(value, f"${POOL_CAPACITY_ENV}") if value else None


def _checked_factor(value: float | str, source: str) -> float:
    factor = _number(value)
    if not 0.0 < factor < float("inf"):
        raise ValueError(
            f"{source}: got {value!r}, needs a finite number above 0 (times the rows of even routing)"
        )
    return factor


def set_synchronous_checks(enabled: bool) -> None:
    """Wait for each call's kernels and raise what they found in the call itself, for debugging.

    Otherwise calls are asynchronous and a fault is raised by the next call on the buffer, by its ``check()``
    or by its ``destroy()``. Calls captured in a CUDA graph never wait.

    Raises:
        ValueError: ``enabled`` is no bool; the text "0", for example, would count as true.
    """
    global _synchronous_checks
    if not isinstance(enabled, bool):
        raise ValueError(f"set_synchronous_checks: got {enabled!r}, needs True or False")
    _synchronous_checks = enabled


def get_synchronous_checks() -> bool:
    """What :func:`set_synchronous_checks` set, else whether ``$PRIME_KERNELS_SYNCHRONOUS_CHECKS`` is 1.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    if _synchronous_checks is not None:
        return _synchronous_checks
    return _checked_switch(os.environ.get(SYNCHRONOUS_ENV) or "0", f"${SYNCHRONOUS_ENV}")


def _checked_switch(value: str, source: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError(f"{source}: got {value!r}, needs 0 or 1")
    return value == "1"


#: What reads each environment variable of this module: takes the value and what an error calls its source,
#: returns the setting. ValueError for a value that is not allowed. An empty variable counts as unset.
ENVIRONMENT: Mapping[str, Callable[[str, str], object]] = {
    BACKEND_ENV: _checked_backend,
    DEVICE_ENV: _checked_device,
    TIMEOUT_ENV: _checked_timeout,
    POOL_CAPACITY_ENV: _checked_factor,
    SYNCHRONOUS_ENV: _checked_switch,
}


def resolve_backend(device: torch.device, mma_type: str) -> str:
    """Decide which backend serves a buffer on ``device``: ``"reference"`` or ``"sm90"``.

    Raises:
        RuntimeError: when the device has no kernel for ``mma_type``. Falling back to the reference is
            never done silently, it has to be asked for with ``set_backend("reference")``.
    """
    backend = get_backend()
    if backend == "reference":
        return backend
    if device.type == "cpu":
        if backend == "auto":
            return "reference"
        raise RuntimeError(
            f'backend "{backend}" needs an SM90 GPU and this buffer is on the CPU; '
            'use set_backend("auto") or set_backend("reference")'
        )
    fix = 'set_backend("reference") runs plain torch on any device'
    kernel = _KERNEL_OF_MMA_TYPE.get(mma_type)
    if kernel is None:
        raise RuntimeError(f"mma_type {mma_type!r} has no GPU kernel, only the reference runs it; {fix}")
    if device.type != "cuda":
        raise RuntimeError(f"mma_type {mma_type!r} needs an SM90 GPU (Hopper), got device {device}; {fix}")
    capability = torch.cuda.get_device_capability(device)
    if capability != _SM90:
        raise RuntimeError(
            f"mma_type {mma_type!r} needs an SM90 GPU (Hopper), {device} is "
            f"SM{capability[0]}{capability[1]}; {fix}"
        )
    from . import registry

    if not registry.is_available(kernel):
        raise RuntimeError(f"kernel {kernel} is not available here: {registry.status()[kernel]}; {fix}")
    return "sm90"
