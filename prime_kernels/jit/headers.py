"""Finds every header a translation unit can include and hashes what is in them.

The scan follows every ``#include`` without evaluating ``#if``, so it can only find more than the compiler
reads. It
knows two roots: the headers of this package (own and vendored) and those of the CUDA toolkit. Paths never
enter a hash, only names relative to an include directory, so equal sources hash equally wherever they are
installed.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """A header that was found: its name below the include directory, its path and the hash of its content."""

    name: str
    path: str
    digest: str


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
        path = os.path.join(root, name)
        parsed = _memo.parse(path)
        if parsed.computed and root in strict_roots:
            raise ValueError(
                f"{name}: #include {parsed.computed[0]} is an include through a macro, which is not followed"
            )
        found[location] = Header(name, path, parsed.digest)
        pending += [(inner, root, os.path.dirname(name)) for inner in parsed.includes]
    return HeaderSet(tuple(found.values()), tuple(sorted(unresolved)))
