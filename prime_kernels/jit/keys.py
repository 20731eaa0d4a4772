"""Names a compiled kernel by everything that goes into it.

Two keys exist. The source key covers the kernel and the headers of this package and can be computed with no
compiler and no CUDA headers installed: it names the cubins shipped inside a wheel. The cache key adds the
CUDA headers and the compiler's version: it names what was compiled on this machine.
"""

from __future__ import annotations

import hashlib

from .compiler import BASE_OPTIONS
from .errors import ToolchainError
from .headers import HeaderSet, all_headers, own_headers
from .source import KernelSource
from .toolchain import Toolchain, package_include_dirs

# Raised when the meaning of a key or of a stored record changes.
KEY_FORMAT = "prime-kernels-2"
# Hexadecimal digits kept of a SHA-256: 128 bits.
KEY_LENGTH = 32
VENDORED_PREFIXES = ("deep_gemm/", "cute/", "cutlass/")


def check_vendored(headers: HeaderSet) -> None:
    """Raises ToolchainError when a kernel needs the vendored headers and the package was never given them."""
    vendored = package_include_dirs()[-1]
    needed = [name for name in headers.unresolved if name.startswith(VENDORED_PREFIXES)]
    if needed and not vendored.is_dir():
        raise ToolchainError(
            f"the vendored header {needed[0]} is missing ({vendored} does not exist): "
            "install the package with pip, or in a source checkout run: python scripts/vendor_deepgemm.py"
        )


def _key(source: KernelSource, headers: HeaderSet, compiler: str) -> str:
    digest = hashlib.sha256()
    parts = (KEY_FORMAT, compiler, source.arch, source.entry, source.code, *BASE_OPTIONS, *source.options)
    for part in parts:
        text = part.encode()
        # Lengths keep two different lists of parts from running into the same bytes.
        digest.update(f"{len(text)}:".encode() + text)
    headers.update(digest)
    return digest.hexdigest()[:KEY_LENGTH]


def source_key(source: KernelSource) -> str:
    """Key of ``source`` without a compiler: kernel, options, architecture and the kernel's own headers."""
    headers = own_headers(source)
    check_vendored(headers)
    return _key(source, headers, "")


def cache_key(source: KernelSource, toolchain: Toolchain, headers: HeaderSet | None = None) -> str:
    """Key of ``source`` as ``toolchain`` compiles it: also the CUDA headers and the compiler's version.

    headers: what ``all_headers`` found, when the caller has it already.
    """
    headers = headers if headers is not None else all_headers(source, toolchain)
    check_vendored(headers)
    return _key(source, headers, f"{toolchain.version_string} {toolchain.build}")
