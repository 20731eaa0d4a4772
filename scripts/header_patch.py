"""Numbered patches on vendored headers, in a format that carries our lines only.

A unified diff quotes the lines it removes and the lines around them. These patches quote nothing: they name
the lines they replace by number, which is safe because each patch pins the SHA-256 of the file it was written
for, and of the file that comes out. Line by line::

    # reason lines, at least one
    file deep_gemm/path/of/header.cuh
    base SHA-256 of the file before
    result SHA-256 of the file after
    @ after LINE            the + lines below come after that line of the base (0: at the top)
    @ replace FIRST LAST    the + lines below take the place of these lines of the base
    @ delete FIRST LAST
    +a line of ours

Line numbers are those of the base, rising and not overlapping. When two patches change one file, the base of
the second is the result of the first. `vendor_deepgemm.py --seal` fills in base and result.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

PATCH_FILES = "[0-9][0-9][0-9][0-9]-*.patch"


class VendorError(RuntimeError):
    """Vendoring stopped; the message says why and what fixes it, and the old folder is untouched."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Patch:
    """One patch on one header, parsed. VendorError with file and line where it cannot be read."""

    def __init__(self, name: str, raw: bytes) -> None:
        self.name = name
        self.digest = sha256(raw)
        self.reason: list[str] = []
        self.head: dict[str, str] = {}
        # Base lines first..last (counted from 0, last excluded) and what takes their place.
        self.edits: list[tuple[int, int, list[str]]] = []
        for number, line in enumerate(raw.decode("utf-8").splitlines(), start=1):
            try:
                self._read(line)
            except (ValueError, IndexError) as error:
                raise VendorError(f"patches/{name}:{number}: {error}") from error
        if self.head.keys() != {"file", "base", "result"} or not self.reason or not self.edits:
            raise VendorError(f"patches/{name}: needs a reason, file, base, result and edits")
        self.file = self.head["file"]

    def _read(self, line: str) -> None:
        if line.startswith("+"):
            if not self.edits:
                raise ValueError("a + line before the first edit")
            self.edits[-1][2].append(line[1:])
        elif line.startswith("@ "):
            self._read_edit(line.split()[1:])
        elif line.startswith("#"):
            self.reason.append(line[1:].strip())
        elif line.strip():
            key, value = line.split(maxsplit=1)
            if key not in ("file", "base", "result"):
                raise ValueError(f"unknown keyword {key!r}")
            self.head[key] = value.strip()

    def _read_edit(self, words: list[str]) -> None:
        kind, numbers = words[0], [int(word) for word in words[1:]]
        if kind == "after" and len(numbers) == 1:
            span = (numbers[0], numbers[0])
        elif kind in ("replace", "delete") and len(numbers) == 2 and 1 <= numbers[0] <= numbers[1]:
            span = (numbers[0] - 1, numbers[1])
        else:
            raise ValueError("an edit is `after LINE`, `replace FIRST LAST` or `delete FIRST LAST`")
        if self.edits and span[0] < self.edits[-1][1]:
            raise ValueError("edits must rise and not overlap")
        self.edits.append((*span, []))

    def edited(self, data: bytes) -> bytes:
        """`data` with the edits made, whatever its hash."""
        lines = data.decode("utf-8").split("\n")
        if self.edits[-1][1] > len(lines):
            raise VendorError(
                f"patches/{self.name}: {self.file} has {len(lines)} lines, the last edit is at line "
                f"{self.edits[-1][1]}"
            )
        for first, last, new in reversed(self.edits):
            lines[first:last] = new
        return "\n".join(lines).encode("utf-8")

    def apply(self, files: dict[str, bytes]) -> None:
        """Replace this patch's file in `files`; VendorError when it is applied already or does not fit."""
        if self.file not in files:
            raise VendorError(f"patches/{self.name}: {self.file} is not among the vendored headers")
        found = sha256(files[self.file])
        if found == self.head["result"]:
            raise VendorError(f"patches/{self.name}: already applied to {self.file}")
        if found != self.head["base"]:
            raise VendorError(
                f"patches/{self.name}: wrong base. {self.file} has SHA-256 {found}, the patch was "
                f"written for {self.head['base']}. Apply patches "
                "in order to the pinned wheel, or rewrite this one."
            )
        patched = self.edited(files[self.file])
        if sha256(patched) != self.head["result"]:
            raise VendorError(
                f"patches/{self.name}: {self.file} comes out as SHA-256 {sha256(patched)}, its result line "
                f"says {self.head['result']}. Seal a changed patch: vendor_deepgemm.py --seal."
            )
        files[self.file] = patched


def read_patches(folder: Path) -> list[Patch]:
    """The patches of a folder, in the order of their numbers."""
    return [Patch(path.name, path.read_bytes()) for path in sorted(folder.glob(PATCH_FILES))]


def seal_patches(folder: Path, files: dict[str, bytes]) -> list[str]:
    """Write the base and result lines of every patch, in order, for the headers `files`; what changed."""
    files = dict(files)
    changed = []
    for path in sorted(folder.glob(PATCH_FILES)):
        text = path.read_text("utf-8")
        lines = [line for line in text.splitlines() if not line.startswith(("base ", "result "))]
        place = next((number for number, line in enumerate(lines, start=1) if line.startswith("file ")), 0)
        if place == 0:
            raise VendorError(f"patches/{path.name}: no `file` line")
        draft = Patch(path.name, "\n".join([*lines[:place], "base -", "result -", *lines[place:]]).encode())
        if draft.file not in files:
            raise VendorError(f"patches/{path.name}: {draft.file} is not among the vendored headers")
        base, result = files[draft.file], draft.edited(files[draft.file])
        files[draft.file] = result
        stamps = [f"base {sha256(base)}", f"result {sha256(result)}"]
        sealed = "\n".join([*lines[:place], *stamps, *lines[place:]]) + "\n"
        if sealed != text:
            path.write_text(sealed, "utf-8")
            changed.append(path.name)
    return changed
