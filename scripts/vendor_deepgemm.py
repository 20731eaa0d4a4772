#!/usr/bin/env python3
"""Fill ``prime_kernels/_vendor`` with the headers of the pinned DeepGEMM wheel.

Nothing of DeepGEMM or CUTLASS is committed to this repository. This script takes the pinned wheel from the
package index pip is configured for, or from the file named by ``PRIME_KERNELS_DEEPGEMM_WHEEL``, checks its
SHA-256, keeps the headers that can be reached from DeepGEMM's own, applies ``patches/`` and writes::

    _vendor/include/{deep_gemm,cute,cutlass}   the headers, patched
    _vendor/licenses/                          the licence texts that travel with them
    _vendor/manifest.json                      where everything came from, with hashes, and the public names

It needs only the standard library and pip. A second run finds the manifest true and does nothing. Every
failure is a `VendorError` that says what to do, and leaves the folder as it was: the new tree is built under
another name and renamed when it is complete.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import hashlib
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TARGET = REPO / "prime_kernels" / "_vendor"
PATCHES = REPO / "patches"

WHEEL_PROJECT = "sgl-deep-gemm"
WHEEL_VERSION = "0.2.5"
WHEEL_SHA256 = "e13778e53f682b806dd2c799b5ad81701114d9346044643a8df7589a845f34e6"
# The wheel is tagged for x86-64 because of a compiled module that is not used; its headers serve every machine.
WHEEL_PLATFORM = "manylinux2014_x86_64"
WHEEL_ENV = "PRIME_KERNELS_DEEPGEMM_WHEEL"

WHEEL_INCLUDE = "deep_gemm/include/"
# An include walk from these decides what is kept: all of DeepGEMM, and the CuTe and CUTLASS headers they reach.
# `cute/tensor.hpp` is a root of its own so that our kernels may use the whole of CuTe's tensor algebra.
ROOT_TREE = "deep_gemm/"
ROOT_FILES = ("cute/tensor.hpp",)
TREES = ("deep_gemm/", "cute/", "cutlass/")

MANIFEST_FORMAT = 1
INCLUDE_LINE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)


class VendorError(RuntimeError):
    """Vendoring stopped; the message says why and what fixes it, and the old folder is untouched."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------------------------------------------------------
# The wheel
# ---------------------------------------------------------------------------------------------------------------


def read_wheel_bytes() -> tuple[bytes, str]:
    """The verified bytes of the pinned wheel, and a word on where they came from."""
    local = os.environ.get(WHEEL_ENV)
    if local:
        try:
            data = Path(local).read_bytes()
        except OSError as error:
            raise VendorError(f"{WHEEL_ENV}={local} cannot be read: {error.strerror}") from error
        source = f"{WHEEL_ENV}={local}"
    else:
        data = download_wheel()
        source = f"pip download {WHEEL_PROJECT}=={WHEEL_VERSION}"
    digest = sha256(data)
    if digest != WHEEL_SHA256:
        raise VendorError(
            f"wrong wheel from {source}: its SHA-256 is {digest}, the pinned {WHEEL_PROJECT}=={WHEEL_VERSION} has "
            f"{WHEEL_SHA256}. Get exactly that file, or unset {WHEEL_ENV} to let pip fetch it."
        )
    return data, source


def download_wheel() -> bytes:
    """Fetch the pinned wheel with pip from whatever index this machine uses."""
    with tempfile.TemporaryDirectory(prefix="prime-kernels-wheel-") as folder:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--platform", WHEEL_PLATFORM, "--dest", folder,
            f"{WHEEL_PROJECT}=={WHEEL_VERSION}",
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(folder).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            said = "\n".join((result.stderr or result.stdout).strip().splitlines()[-4:])
            raise VendorError(
                f"pip could not fetch {WHEEL_PROJECT}=={WHEEL_VERSION} (exit status {result.returncode}):\n{said}\n"
                f"Check the network and pip's index, or download that wheel elsewhere and set {WHEEL_ENV}=FILE."
            )
        return wheels[0].read_bytes()


def included(text: str) -> list[str]:
    return INCLUDE_LINE.findall(text)


def reachable_headers(files: dict[str, bytes]) -> dict[str, bytes]:
    """The part of `files` (include path -> bytes) that DeepGEMM's headers can reach, whatever the macros say."""
    todo = [name for name in files if name.startswith(ROOT_TREE) or name in ROOT_FILES]
    kept: dict[str, bytes] = {}
    while todo:
        name = todo.pop()
        if name in kept:
            continue
        kept[name] = files[name]
        for target in included(files[name].decode("utf-8", errors="replace")):
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            todo.extend(found for found in (target, beside) if found in files)
    return dict(sorted(kept.items()))


# ---------------------------------------------------------------------------------------------------------------
# Patches
# ---------------------------------------------------------------------------------------------------------------


class Patch:
    """One numbered patch on one header. It carries our lines only; what it replaces is named by line number.

    The format, line by line::

        # any number of reason lines (at least one)
        file deep_gemm/path/of/header.cuh
        base SHA-256 of the file before
        result SHA-256 of the file after
        @ after LINE            the + lines below come after that line of the base (0: at the top)
        @ replace FIRST LAST    the + lines below take the place of these lines of the base
        @ delete FIRST LAST
        +a line of ours

    Line numbers are those of the base, rising and not overlapping. When two patches change one file, the base
    of the second is the result of the first.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        raw = path.read_bytes()
        self.digest = sha256(raw)
        self.reason: list[str] = []
        self.head: dict[str, str] = {}
        self.edits: list[tuple[int, int, list[str]]] = []  # base lines [first, last) -> new lines, counted from 0
        for number, line in enumerate(raw.decode("utf-8").splitlines(), start=1):
            try:
                self._read(line)
            except (ValueError, IndexError) as error:
                raise VendorError(f"patches/{self.name}:{number}: {error}") from error
        missing = [key for key in ("file", "base", "result") if key not in self.head]
        if missing or not self.reason or not self.edits:
            raise VendorError(f"patches/{self.name}: needs a reason, file, base, result and edits (missing: {missing})")
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

    def edit(self, data: bytes) -> bytes:
        """Apply the edits without looking at any hash (used to compute `result` for a new patch)."""
        lines = data.decode("utf-8").split("\n")
        if self.edits[-1][1] > len(lines):
            raise VendorError(f"patches/{self.name}: line {self.edits[-1][1]} is past the end of {self.file}")
        for first, last, new in reversed(self.edits):
            lines[first:last] = new
        return "\n".join(lines).encode("utf-8")

    def apply(self, files: dict[str, bytes]) -> None:
        """Replace this patch's file in `files`, or say why it does not fit."""
        if self.file not in files:
            raise VendorError(f"patches/{self.name}: {self.file} is not among the vendored headers")
        found = sha256(files[self.file])
        if found == self.head["result"]:
            raise VendorError(f"patches/{self.name}: already applied to {self.file}")
        if found != self.head["base"]:
            raise VendorError(
                f"patches/{self.name}: wrong base, {self.file} has SHA-256 {found}, the patch was written for "
                f"{self.head['base']}. Apply the patches in order to the pinned wheel, or rewrite this one."
            )
        patched = self.edit(files[self.file])
        if sha256(patched) != self.head["result"]:
            raise VendorError(
                f"patches/{self.name}: {self.file} comes out as SHA-256 {sha256(patched)}, the patch says "
                f"{self.head['result']}. The patch was changed without its result line."
            )
        files[self.file] = patched


def read_patches(folder: Path) -> list[Patch]:
    return [Patch(path) for path in sorted(folder.glob("[0-9][0-9][0-9][0-9]-*.patch"))]


# ---------------------------------------------------------------------------------------------------------------
# Public names and licences, read from the wheel
# ---------------------------------------------------------------------------------------------------------------


def public_names(source: str) -> tuple[set[str], list[str]]:
    """What a module binds at its top level (also inside try and if), and the sibling modules it star-imports."""
    names: set[str] = set()
    stars: list[str] = []

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.ImportFrom) and node.level > 0:
                for alias in node.names:
                    if alias.name == "*":
                        stars.append(node.module or "")
                    else:
                        names.add(alias.asname or alias.name)
            elif isinstance(node, (ast.Try, ast.If)):
                visit(node.body)

    visit(ast.parse(source).body)
    return {name for name in names if not name.startswith("_")}, stars


def upstream_names(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    """Module path inside `deep_gemm` ("" is the package itself) -> its public names, star imports resolved."""
    modules: dict[str, tuple[set[str], list[str]]] = {}
    packages: set[str] = set()
    for entry in wheel.namelist():
        if not (entry.startswith("deep_gemm/") and entry.endswith(".py")) or entry.startswith(WHEEL_INCLUDE):
            continue
        module = entry[len("deep_gemm/") : -len(".py")].replace("/", ".")
        if module.split(".")[-1] == "__init__":
            module = module.removesuffix("__init__").rstrip(".")
            packages.add(module)
        modules[module] = public_names(wheel.read(entry).decode("utf-8"))

    def names_of(module: str) -> set[str]:
        own, stars = modules[module]
        parent = module if module in packages else module.rpartition(".")[0]
        starred = (names_of(f"{parent}.{star}".strip(".")) for star in stars)
        return own.union(*starred)

    return {module: sorted(names_of(module)) for module in sorted(modules)}


def first_comment(text: str) -> str:
    """The comment a header starts with, without its comment signs: where CUTLASS states its licence."""
    text = text.lstrip()
    if text.startswith("/*"):
        block = text[2 : text.find("*/")]
        lines = [line.strip().strip("*").strip() for line in block.splitlines()]
    else:
        lines = []
        for line in text.splitlines():
            if not line.startswith("//"):
                break
            lines.append(line.lstrip("/").strip())
    return "\n".join(lines).strip()


def third_party_text(files: dict[str, bytes]) -> str:
    """Every licence notice that the kept headers carry, once each, with the files it covers."""
    notices: dict[str, list[str]] = {}
    for name, data in files.items():
        comment = first_comment(data.decode("utf-8", errors="replace"))
        if "copyright" in comment.lower():
            notices.setdefault(comment, []).append(name)
    parts = ["Notices found in the vendored headers, generated when they were vendored.\n"]
    for notice, covered in notices.items():
        parts.append("=" * 79 + "\n" + "\n".join(covered) + "\n" + "-" * 79 + "\n" + notice + "\n")
    return "\n".join(parts)


# ---------------------------------------------------------------------------------------------------------------
# The folder
# ---------------------------------------------------------------------------------------------------------------


def inputs(patches: list[Patch]) -> dict[str, object]:
    """What decides the content of the folder: equal inputs mean equal folders."""
    return {
        "format": MANIFEST_FORMAT,
        "wheel": {"project": WHEEL_PROJECT, "version": WHEEL_VERSION, "sha256": WHEEL_SHA256},
        "patches": {patch.name: patch.digest for patch in patches},
        "script": sha256(Path(__file__).read_bytes()),
    }


def tree_hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def read_manifest(target: Path) -> dict[str, object]:
    """The manifest of a complete folder; a half-written or hand-edited folder is an error."""
    advice = f"Look at what differs, then run `{Path(__file__).name} --force` to write the folder anew."
    try:
        manifest = json.loads((target / "manifest.json").read_text("utf-8"))
        stated = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise VendorError(f"{target} is half-written: no readable manifest.json ({error}). {advice}") from error
    found = tree_hashes(target)
    wrong = sorted(name for name in stated.keys() | found.keys() if stated.get(name) != found.get(name))
    if wrong:
        raise VendorError(
            f"{target} does not match its manifest: {len(wrong)} files are missing, extra or changed, the first is "
            f"{wrong[0]}. {advice}"
        )
    return manifest


def write_tree(folder: Path, wheel_data: bytes, patches: list[Patch]) -> None:
    """Write a complete vendor folder at `folder`, which must not exist."""
    with tempfile.TemporaryFile() as stream:
        stream.write(wheel_data)
        with zipfile.ZipFile(stream) as wheel:
            headers = {
                name[len(WHEEL_INCLUDE) :]: wheel.read(name)
                for name in wheel.namelist()
                if name.startswith(tuple(WHEEL_INCLUDE + tree for tree in TREES)) and not name.endswith("/")
            }
            names = upstream_names(wheel)
            licence = wheel.read(f"sgl_deep_gemm-{WHEEL_VERSION}.dist-info/licenses/LICENSE")
    kept = reachable_headers(headers)
    notices = third_party_text(kept)
    for patch in patches:
        patch.apply(kept)
    content = {f"include/{name}": data for name, data in kept.items()}
    content["licenses/LICENSE.deepgemm"] = licence
    content["licenses/THIRD_PARTY_NOTICES.txt"] = notices.encode("utf-8")
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    manifest = {
        "inputs": inputs(patches),
        "patched": sorted({patch.file for patch in patches}),
        "names": names,
        "files": {name: sha256(data) for name, data in sorted(content.items())},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """One vendoring at a time for one target; the lock goes with the process that held it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def swap_in(new: Path, target: Path) -> None:
    """Put the complete folder `new` in the place of `target`; a crash between the two renames is healed by `heal`."""
    old = target.parent / f".{target.name}.old"
    if target.exists():
        os.rename(target, old)
    os.rename(new, target)
    shutil.rmtree(old, ignore_errors=True)


def heal(target: Path) -> None:
    """Undo what a killed run left: bring a moved folder back, drop an unfinished one."""
    old, new = (target.parent / f".{target.name}.{suffix}" for suffix in ("old", "new"))
    if old.exists() and not target.exists():
        os.rename(old, target)
    for leftover in (old, new):
        if leftover.exists():
            shutil.rmtree(leftover)


def vendor(target: Path = TARGET, patches: Path = PATCHES, force: bool = False) -> bool:
    """Bring `target` up to date; False when there was nothing to do.

    Raises `VendorError`, with the old folder untouched, for a wheel that is wrong or cannot be had, a patch that
    does not fit, and (unless `force`) a folder that does not match its own manifest.
    """
    found = read_patches(patches)
    with locked(target):
        heal(target)
        if target.exists() and not force and read_manifest(target)["inputs"] == inputs(found):
            return False
        data, _ = read_wheel_bytes()
        new = target.parent / f".{target.name}.new"
        try:
            write_tree(new, data, found)
            swap_in(new, target)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill prime_kernels/_vendor from the pinned DeepGEMM wheel.")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder to write (default: %(default)s)")
    parser.add_argument("--patches", type=Path, default=PATCHES, help="folder of patches (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="write anew even when the folder is complete or damaged")
    options = parser.parse_args(argv)
    try:
        changed = vendor(options.target, options.patches, options.force)
    except VendorError as error:
        print(f"vendoring failed: {error}", file=sys.stderr)
        return 1
    print(f"{options.target}: {'written' if changed else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
