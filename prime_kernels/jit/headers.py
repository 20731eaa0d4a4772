"""Finds every header a translation unit can include, hashes it and hands it to the compiler.

The scan follows every ``#include`` without evaluating ``#if``, so it can only find more than the compiler
reads. It knows two kinds of headers: a kernel's own (of this package, vendored ones among them, and of the
kernel's ``include_dirs``) and those of the CUDA toolkit. Paths never enter a hash, only names below an
include directory, so equal sources hash equally wherever they are installed. The compiler gets own headers
from memory under these names: it sees what was hashed, and no path of this machine ends up in a cubin.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .source import KernelSource
from .toolchain import Toolchain, package_include_dirs

# Included before every translation unit.
PRELUDE = "prime_kernels/nvrtc_prelude.cuh"

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*(?:([<"])([^>"\n]+)[>"]|([A-Za-z_][^\n]*))', re.MULTILINE)
# CUTLASS names the C++ library through this macro; under NVRTC it stands for cuda/std.
_STD_HEADER_MACRO = re.compile(r"CUDA_STD_HEADER\((\w+)\)")
_STD_HEADER_PREFIX = "cuda/std/"

# A file changed less than this long before it was read may change again within the same time stamp, so what
# was read is not remembered (the rule version control systems use for their indexes).
_SETTLED_NS = 2_000_000_000


@dataclass(frozen=True)
class _Include:
    name: str
    quoted: bool


@dataclass(frozen=True)
class _Parsed:
    digest: str
    includes: tuple[_Include, ...]
    computed: tuple[str, ...]


@dataclass(frozen=True)
class Header:
    """A header that was found: the include directory, the name below it and the hash of its content."""

    root: str
    name: str
    digest: str

    @property
    def path(self) -> str:
        """Where the header lies on this machine."""
        return os.path.join(self.root, self.name)


def parse_includes(text: bytes) -> tuple[tuple[_Include, ...], tuple[str, ...]]:
    """The includes of ``text``, and those that name a macro that is not understood."""
    includes: dict[_Include, None] = {}
    computed = []
    for quote, name, expression in _INCLUDE.findall(text):
        if not expression:
            includes[_Include(name.decode(errors="surrogateescape"), quote == b'"')] = None
            continue
        macro = _STD_HEADER_MACRO.match(expression.decode(errors="surrogateescape"))
        if macro is not None:
            includes[_Include(_STD_HEADER_PREFIX + macro.group(1), False)] = None
        else:
            computed.append(expression.decode(errors="surrogateescape").strip())
    return tuple(includes), tuple(computed)


class _FileMemo:
    """Parsed headers by path. An entry counts only while the file's identity, size and time stamps are
    unchanged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, tuple[tuple[int, ...], _Parsed]] = {}

    def parse(self, path: str) -> _Parsed:
        status = os.stat(path)
        # ctime cannot be set by a program, so an edit that restores mtime and size is still seen.
        signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        with self._lock:
            entry = self._entries.get(path)
        if entry is not None and entry[0] == signature:
            return entry[1]
        text = Path(path).read_bytes()
        parsed = _Parsed(hashlib.sha256(text).hexdigest(), *parse_includes(text))
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
            with self._lock:
                self._entries[path] = (signature, parsed)
        return parsed


_memo = _FileMemo()


@dataclass(frozen=True)
class HeaderSet:
    """Every header reachable from a translation unit, and the names that no include directory has."""

    headers: tuple[Header, ...]
    unresolved: tuple[str, ...]

    def update(self, digest: hashlib._Hash) -> None:
        """Feeds names and contents to ``digest`` in an order that does not depend on the scan."""
        for header in sorted(self.headers, key=lambda h: (h.name, h.digest)):
            digest.update(f"{header.name}\0{header.digest}\0".encode(errors="surrogateescape"))
        for name in self.unresolved:
            digest.update(f"{name}\0missing\0".encode(errors="surrogateescape"))


class _Directories:
    """Include directories with their listings kept for one scan, so that a miss costs no system call."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.paths = [str(directory) for directory in directories]
        self._listings: dict[str, frozenset[str]] = {}

    def _has(self, path: str) -> bool:
        folder, name = os.path.split(path)
        listing = self._listings.get(folder)
        if listing is None:
            try:
                listing = frozenset(os.listdir(folder))
            except (FileNotFoundError, NotADirectoryError):
                listing = frozenset()
            self._listings[folder] = listing
        return name in listing and os.path.isfile(path)

    def resolve(self, include: _Include, root: str, folder: str) -> tuple[str, str] | None:
        """(include directory, name below it) of ``include`` seen in ``root``/``folder``, None when nothing
        has it.
        """
        if include.quoted and root:
            name = os.path.normpath(os.path.join(folder, include.name))
            if self._has(os.path.join(root, name)):
                return root, name
        name = os.path.normpath(include.name)
        for candidate in self.paths:
            if self._has(os.path.join(candidate, name)):
                return candidate, name
        return None


def scan(code: str, extra: Iterable[str], directories: Sequence[Path], strict: Sequence[Path]) -> HeaderSet:
    """Headers reachable from ``code`` and from the names in ``extra`` through the include ``directories``.

    A header below one of ``strict`` may not have an include whose name is a macro, since its content could
    then change
    unseen: that raises ValueError. Elsewhere (installed CUDA packages) such an include stays inside the
        package.
    """
    search = _Directories(directories)
    strict_roots = {str(directory) for directory in strict}
    includes, computed = parse_includes(code.encode())
    if computed:
        raise ValueError(
            f"#include {computed[0]}: name the header itself, an include through a macro is not followed"
        )
    found: dict[tuple[str, str], Header] = {}
    unresolved: set[str] = set()
    pending = [(include, "", "") for include in (*(_Include(name, False) for name in extra), *includes)]
    while pending:
        include, root, folder = pending.pop()
        location = search.resolve(include, root, folder)
        if location is None:
            unresolved.add(include.name)
            continue
        if location in found:
            continue
        root, name = location
        parsed = _memo.parse(os.path.join(root, name))
        if parsed.computed and root in strict_roots:
            raise ValueError(
                f"{name}: #include {parsed.computed[0]} is an include through a macro, which is not followed"
            )
        found[location] = Header(root, name, parsed.digest)
        pending += [(inner, root, os.path.dirname(name)) for inner in parsed.includes]
    return HeaderSet(tuple(found.values()), tuple(sorted(unresolved)))


def own_directories(source: KernelSource) -> tuple[Path, ...]:
    """Include directories whose content belongs to the kernel rather than to the CUDA toolkit."""
    return (*(Path(directory) for directory in source.include_dirs), *package_include_dirs())


def own_headers(source: KernelSource) -> HeaderSet:
    """Headers of the kernel itself; those of the CUDA toolkit stay unresolved."""
    own = own_directories(source)
    return scan(source.code, [PRELUDE], own, own)


def all_headers(source: KernelSource, toolchain: Toolchain) -> HeaderSet:
    """Headers of the kernel and of the CUDA toolkit."""
    own = own_directories(source)
    return scan(source.code, [PRELUDE], (*own, *toolchain.include_dirs), own)


def embedded_headers(source: KernelSource, headers: HeaderSet) -> dict[str, bytes]:
    """Name -> content of the kernel's own headers among ``headers``, for a compiler without files.

    Such a compiler looks for a header by the name as it is written, so an include relative to the including
    file is replaced by the full name. Raises ValueError when two headers would need one name, RuntimeError
    when a header was edited since it was hashed.
    """
    own = [str(directory) for directory in own_directories(source)]
    search = _Directories(own_directories(source))
    embedded: dict[str, bytes] = {}
    for header in headers.headers:
        if header.root not in own:
            continue
        if header.name in embedded:
            raise ValueError(
                f"kernel {source.name!r} reaches two headers called {header.name}; rename one of them"
            )
        text = Path(header.path).read_bytes()
        if hashlib.sha256(text).hexdigest() != header.digest:
            raise RuntimeError(f"{header.path} was edited while kernel {source.name!r} was being compiled")
        embedded[header.name] = _INCLUDE.sub(
            functools.partial(_full_name, header=header, search=search), text
        )
    return embedded


def _full_name(match: re.Match[bytes], header: Header, search: _Directories) -> bytes:
    quote, name, _ = match.groups()
    line = match.group(0)
    if quote != b'"':
        return line
    include = _Include(name.decode(errors="surrogateescape"), True)
    location = search.resolve(include, header.root, os.path.dirname(header.name))
    if location is None or location[1] == include.name:
        return line
    return line.replace(b'"' + name + b'"', b"<" + location[1].encode(errors="surrogateescape") + b">")
