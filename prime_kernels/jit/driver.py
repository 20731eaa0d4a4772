"""The CUDA driver API through cuda-python: lazy loading, contexts, modules, and errors with names.

Importing this module loads neither cuda-python nor ``libcuda``; the first call that needs the driver does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

_init_lock = threading.Lock()
_initialised = False

# Entry points that cuda-python does not wrap the way this package needs are asked for at this version:
# tensor maps and clusters came with CUDA 12.0.
_PROC_ADDRESS_VERSION = 12000


class CudaError(RuntimeError):
    """A driver call failed.

    Attributes:
        result: the name of the ``CUresult``, for example ``"CUDA_ERROR_INVALID_VALUE"``.
        code: its number.
    """

    def __init__(self, message: str, result: str, code: int) -> None:
        super().__init__(message)
        self.result = result
        self.code = code


@functools.cache
def bindings() -> Any:
    """The module ``cuda.bindings.driver``; loads no driver library.

    Raises:
        RuntimeError: when cuda-python is not installed; the message holds the pip line.
    """
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise RuntimeError(
            f"cuda-python is not usable ({error}); install it with: pip install 'cuda-python>=12.9'"
        ) from error


def driver() -> Any:
    """``cuda.bindings.driver`` with the driver initialised (``cuInit``); creates no context.

    Raises:
        RuntimeError: when the machine has no NVIDIA driver library.
        CudaError: when the driver refuses to start, for example because it sees no GPU.
    """
    global _initialised
    api = bindings()
    if not _initialised:
        with _init_lock:
            if not _initialised:
                try:
                    result = api.cuInit(0)
                except RuntimeError as error:
                    raise RuntimeError(
                        f"no usable NVIDIA driver on this machine ({error}); "
                        "launching kernels needs libcuda.so.1, which comes with the GPU driver"
                    ) from error
                check(result, "cuInit")
                _initialised = True
    return api


def describe(result: Any) -> str:
    """``NAME (code): text`` of a ``CUresult``."""
    code = int(result)
    name = getattr(result, "name", f"CUresult {code}")
    return f"{name} ({code}){_error_text(result)}"


def _error_text(result: Any) -> str:
    if not _initialised:
        return ""
    status, text = bindings().cuGetErrorString(result)
    if int(status) != 0 or not text:
        return ""
    return f": {text.decode() if isinstance(text, bytes) else text}"


def check(result: Sequence[Any], what: str) -> Any:
    """Unpack what a cuda-python call returned.

    Args:
        result: the tuple ``(CUresult, value...)``.
        what: the call and its subject, for the error message.

    Returns:
        None, the one value, or a tuple of the values.

    Raises:
        CudaError: when the result is not ``CUDA_SUCCESS``.
    """
    status = result[0]
    if int(status) != 0:
        name = getattr(status, "name", f"CUresult {int(status)}")
        raise CudaError(f"{what} failed with {describe(status)}", name, int(status))
    values = result[1:]
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


@functools.cache
def device_attribute(device: int, name: str) -> int:
    """A ``CU_DEVICE_ATTRIBUTE_<name>`` of device number ``device``."""
    api = driver()
    attribute = getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    handle = check(api.cuDeviceGet(device), f"cuDeviceGet({device})")
    return int(check(api.cuDeviceGetAttribute(attribute, handle), f"cuDeviceGetAttribute({name})"))


@functools.cache
def primary_context(device: int) -> Any:
    """The primary context of device number ``device``, the one torch uses; created if there is none yet.

    It is retained once and kept until the process ends, as torch does.
    """
    api = driver()
    handle = check(api.cuDeviceGet(device), f"cuDeviceGet({device})")
    return check(api.cuDevicePrimaryCtxRetain(handle), f"cuDevicePrimaryCtxRetain(device {device})")


@contextlib.contextmanager
def current_context(context: Any) -> Iterator[None]:
    """Make ``context`` the calling thread's current context for the length of a ``with`` block."""
    api = driver()
    check(api.cuCtxPushCurrent(context), "cuCtxPushCurrent")
    try:
        yield
    finally:
        check(api.cuCtxPopCurrent(), "cuCtxPopCurrent")


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow calls such as module loading in this thread while another stream capture is going on."""
    api = driver()
    relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = check(api.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        check(api.cuThreadExchangeStreamCaptureMode(previous), "cuThreadExchangeStreamCaptureMode")


def load_function(cubin: bytes, symbol: str, context: Any) -> Any:
    """Load a cubin into ``context`` and return its function ``symbol``, ready to launch.

    The code is loaded here and not at the first launch, so that the first launch may be inside a CUDA
    graph capture. The module stays loaded as long as the context lives.

    Raises:
        CudaError: for example ``CUDA_ERROR_NO_BINARY_FOR_GPU`` for a cubin of another architecture.
    """
    api = driver()
    with current_context(context), relaxed_capture():
        module = check(api.cuModuleLoadData(cubin), f"cuModuleLoadData of {symbol}")
        function = check(api.cuModuleGetFunction(module, symbol.encode()), f"cuModuleGetFunction({symbol})")
        if hasattr(api, "cuFuncLoad") and driver_version() >= (12, 4):
            check(api.cuFuncLoad(function), f"cuFuncLoad({symbol})")
    return function


@functools.cache
def driver_version() -> tuple[int, int]:
    """The newest CUDA version the installed driver supports, as (major, minor)."""
    api = driver()
    version = int(check(api.cuDriverGetVersion(), "cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


def parameter_sizes(function: Any) -> tuple[int, ...] | None:
    """The size in bytes of each parameter of a kernel; None where the driver (before CUDA 12.4) can't say."""
    api = driver()
    if not hasattr(api, "cuFuncGetParamInfo") or driver_version() < (12, 4):
        return None
    sizes: list[int] = []
    while True:
        result = api.cuFuncGetParamInfo(function, len(sizes))
        # The one way to learn the count: the index past the last parameter is an invalid value.
        if result[0] == api.CUresult.CUDA_ERROR_INVALID_VALUE:
            return tuple(sizes)
        _, size = check(result, f"cuFuncGetParamInfo({len(sizes)})")
        sizes.append(int(size))


def function_attribute(function: Any, name: str) -> int:
    """A ``CU_FUNC_ATTRIBUTE_<name>`` of a loaded function."""
    api = driver()
    attribute = getattr(api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    return int(check(api.cuFuncGetAttribute(attribute, function), f"cuFuncGetAttribute({name})"))


def set_function_attribute(function: Any, name: str, value: int) -> None:
    """Set a ``CU_FUNC_ATTRIBUTE_<name>`` of a loaded function."""
    api = driver()
    attribute = getattr(api.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    check(api.cuFuncSetAttribute(function, attribute, value), f"cuFuncSetAttribute({name}, {value})")


@functools.cache
def entry_address(name: str) -> int:
    """The address of a driver function, for calls that ctypes must make itself."""
    api = driver()
    result = api.cuGetProcAddress(name.encode(), _PROC_ADDRESS_VERSION, 0)
    address = int(check(result[:2], f"cuGetProcAddress({name})"))
    if address == 0:
        raise RuntimeError(
            f"the installed driver has no {name}; it needs a driver for CUDA 12.0 or newer, "
            f"this one supports {'.'.join(map(str, driver_version()))}"
        )
    return address
