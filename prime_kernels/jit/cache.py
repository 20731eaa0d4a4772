"""Keeps compiled kernels on disk, so that each is compiled once per machine.

A kernel is two files named by its key: the cubin and a JSON record with the cubin's hash. Both are written
to a temporary name, flushed and renamed, the record last: a process killed at any point leaves either a whole
entry or none. A file lock per entry lets one process of a node compile while the others wait. A directory
that cannot be written costs one warning; kernels then live as long as the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import secrets
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from .compiler import compile_uncached
from .cubin import Cubin, Resources
from .errors import CacheWarning
from .headers import all_headers
from .keys import KEY_FORMAT, cache_key, source_key
from .source import KernelSource
from .toolchain import find_toolchain, package_root

CACHE_DIR_VARIABLE = "PRIME_KERNELS_CACHE_DIR"
CACHE_FOLDER = "prime_kernels"
AOT_FOLDER = "_aot"
# Longer than any compile; only a lock that its file system lost is waited for this long.
LOCK_TIMEOUT_SECONDS = 600.0
TEMPORARY_PREFIX = ".tmp-"
# Temporary files this old belong to processes that were killed while writing.
STALE_TEMPORARY_SECONDS = 3600.0

_logger = logging.getLogger(__name__)
# Kernels of this process whose directory could not be written, by directory and key.
_unstored: dict[tuple[str, str], Cubin] = {}
_warned: set[str] = set()
_state_lock = threading.Lock()


def default_cache_dir() -> Path:
    """``PRIME_KERNELS_CACHE_DIR``, or ``prime_kernels`` in the XDG cache directory (``~/.cache``)."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    if chosen:
        return Path(chosen).absolute()
    # The XDG specification says to ignore relative paths.
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / CACHE_FOLDER
    home = os.path.expanduser("~")
    # A user without a home directory: "/" cannot be written either, and the cache will say so.
    return Path(home if os.path.isabs(home) else os.sep) / ".cache" / CACHE_FOLDER


def aot_dir() -> Path:
    """Where a wheel built with ready cubins keeps them, named by source key."""
    return package_root() / AOT_FOLDER


class KernelCache:
    """Compiled kernels in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def paths(self, name: str, key: str) -> tuple[Path, Path]:
        """The cubin and the record of an entry."""
        return self.directory / f"{name}-{key}.cubin", self.directory / f"{name}-{key}.json"

    def read(self, name: str, key: str, origin: str = "cache") -> Cubin | None:
        """The kernel stored under ``key``; None when there is none or its files do not fit together (with a
        warning).
        """
        cubin_path, record_path = self.paths(name, key)
        try:
            text = record_path.read_bytes()
            data = cubin_path.read_bytes()
        except OSError:
            # Not there, or not readable: either way the kernel is compiled, and storing it will say what is
            # wrong.
            return None
        try:
            record = json.loads(text)
            if record["format"] != KEY_FORMAT or record["sha256"] != hashlib.sha256(data).hexdigest():
                raise ValueError("the record does not describe the cubin beside it")
            resources = Resources(**record["resources"])
            return Cubin(data, record["symbol"], record["arch"], resources, record["log"], cubin_path, origin)
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"{cubin_path} is damaged ({error}) and is compiled again", CacheWarning, stacklevel=2
            )
            return None

    def store(self, name: str, key: str, cubin: Cubin) -> Path:
        """Writes an entry and returns the path of its cubin. Raises OSError when the directory cannot take
        it.
        """
        cubin_path, record_path = self.paths(name, key)
        record = {
            "format": KEY_FORMAT,
            "symbol": cubin.symbol,
            "arch": cubin.arch,
            "sha256": hashlib.sha256(cubin.data).hexdigest(),
            "resources": dataclasses.asdict(cubin.resources),
            "log": cubin.log,
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_stale_temporaries()
        self._write(cubin_path, cubin.data)
        self._write(record_path, json.dumps(record, indent=1).encode())
        return cubin_path

    @contextlib.contextmanager
    def locked(self, name: str, key: str) -> Iterator[None]:
        """Holds the lock of an entry. Raises OSError or NotImplementedError when the directory cannot hold
        locks.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.directory / f"{name}-{key}.lock", timeout=LOCK_TIMEOUT_SECONDS)
        try:
            lock.acquire()
        except Timeout:
            raise OSError(
                f"the lock {lock.lock_file} was not released in {LOCK_TIMEOUT_SECONDS:.0f} s"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def entries(self) -> list[Path]:
        """Cubins with a record, which is what ``read`` can return."""
        if not self.directory.is_dir():
            return []
        return [
            p.with_suffix(".cubin")
            for p in self.directory.glob("*.json")
            if p.with_suffix(".cubin").is_file()
        ]

    def _write(self, path: Path, data: bytes) -> None:
        temporary = self.directory / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _remove_stale_temporaries(self) -> None:
        oldest = time.time() - STALE_TEMPORARY_SECONDS
        for path in self.directory.glob(f"{TEMPORARY_PREFIX}*"):
            # Another process may remove it first.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _warn_once(directory: Path, error: BaseException) -> None:
    with _state_lock:
        if str(directory) in _warned:
            return
        _warned.add(str(directory))
    warnings.warn(
        f"the kernel cache {directory} cannot be used ({error}); every process compiles its kernels again. "
        f"Set {CACHE_DIR_VARIABLE} to a directory that can be written",
        CacheWarning,
        stacklevel=3,
    )


def read_aot(source: KernelSource) -> Cubin | None:
    """The cubin shipped with the package for ``source``, None when it ships none. Needs no compiler."""
    directory = aot_dir()
    if not directory.is_dir():
        return None
    return KernelCache(directory).read(source.name, source_key(source), origin="aot")


def compile_kernel(source: KernelSource, *, cache_dir: Path | None = None) -> Cubin:
    """The kernel of ``source``: shipped with the package, cached, or compiled now and stored.

    cache_dir: directory to use, by default that of ``default_cache_dir``.

    Raises ToolchainError when it has to be compiled and NVRTC or a header package is missing (the message
    names the pip packages), CompileError when the compiler refuses it, ValueError for a source that cannot be
    keyed. Needs no GPU.
    """
    shipped = read_aot(source)
    if shipped is not None:
        return shipped
    toolchain = find_toolchain()
    headers = all_headers(source, toolchain)
    key = cache_key(source, toolchain, headers)
    cache = KernelCache(cache_dir if cache_dir is not None else default_cache_dir())
    # A hit needs no lock, which also makes a filled read-only directory usable.
    found = cache.read(source.name, key) or _unstored.get((str(cache.directory), key))
    if found is not None:
        return found
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(cache.locked(source.name, key))
        except (OSError, NotImplementedError) as error:
            _warn_once(cache.directory, error)
        else:
            # Another process may have compiled it while this one waited.
            found = cache.read(source.name, key)
            if found is not None:
                return found
        started = time.monotonic()
        cubin = compile_uncached(source, toolchain, headers)
        _logger.info("compiled %s for %s in %.1f s", source.name, source.arch, time.monotonic() - started)
        try:
            return cubin.replace(path=cache.store(source.name, key, cubin), origin="compiled")
        except OSError as error:
            _warn_once(cache.directory, error)
            _unstored[str(cache.directory), key] = cubin
            return cubin
