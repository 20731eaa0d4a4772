#!/usr/bin/env python3
"""Fill `prime_kernels/_vendor` with the headers of the pinned DeepGEMM wheel.

Nothing of DeepGEMM or CUTLASS is committed to this repository. This script takes the pinned wheel from the
package index that pip is configured for, or from the file named by `PRIME_KERNELS_DEEPGEMM_WHEEL`, checks its
SHA-256, keeps the headers that DeepGEMM's own can reach, applies `patches/` and writes::

    _vendor/include/{deep_gemm,cute,cutlass}   the headers, patched
    _vendor/licenses/                          the licence texts that travel with them
    _vendor/manifest.json                      where everything came from, with hashes, and the public names

It needs only the standard library and pip. A second run finds the manifest true and does nothing. Every
failure is a `VendorError` that says what to do and leaves the folder as it was: the new tree is built under
another name and renamed when it is complete.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import io
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from header_patch import Patch, VendorError, read_patches, seal_patches, sha256

REPO = Path(__file__).resolve().parent.parent
TARGET = REPO / "prime_kernels" / "_vendor"
PATCHES = REPO / "patches"

WHEEL_PROJECT = "sgl-deep-gemm"
WHEEL_VERSION = "0.2.5"
WHEEL_SHA256 = "e13778e53f682b806dd2c799b5ad81701114d9346044643a8df7589a845f34e6"
# The wheel is tagged x86-64 because of a compiled module that is not used; its headers serve every machine.
WHEEL_PLATFORM = "manylinux2014_x86_64"
WHEEL_ENV = "PRIME_KERNELS_DEEPGEMM_WHEEL"
WHEEL_PACKAGE = "deep_gemm/"
WHEEL_INCLUDE = "deep_gemm/include/"
WHEEL_LICENCE = f"sgl_deep_gemm-{WHEEL_VERSION}.dist-info/licenses/LICENSE"

# What is kept: all of DeepGEMM, and the CuTe and CUTLASS headers that an include walk from there reaches.
# CuTe's tensor header is a root of its own, so that our kernels may use all of its tensor algebra.
TREES = ("deep_gemm/", "cute/", "cutlass/")
ROOT_TREE = "deep_gemm/"
ROOT_FILES = ("cute/tensor.hpp",)
INCLUDE_LINE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)

MANIFEST_FORMAT = 1
NOTICE_RULE = "=" * 79


# --- the wheel ------------------------------------------------------------------------------------


def read_wheel() -> zipfile.ZipFile:
    """The pinned wheel, its hash verified."""
    local = os.environ.get(WHEEL_ENV)
    if local:
        source = f"{WHEEL_ENV}={local}"
        try:
            data = Path(local).read_bytes()
        except OSError as error:
            raise VendorError(f"{source} cannot be read: {error.strerror}") from error
    else:
        source = f"pip download {WHEEL_PROJECT}=={WHEEL_VERSION}"
        data = download_wheel()
    digest = sha256(data)
    if digest != WHEEL_SHA256:
        raise VendorError(
            f"wrong wheel from `{source}`: its SHA-256 is {digest}, that of the pinned "
            f"{WHEEL_PROJECT}=={WHEEL_VERSION} is {WHEEL_SHA256}. Get exactly that file, or unset "
            f"{WHEEL_ENV} to let pip fetch it."
        )
    return zipfile.ZipFile(io.BytesIO(data))


def download_wheel() -> bytes:
    """Fetch the pinned wheel with pip, from whatever index this machine uses."""
    with tempfile.TemporaryDirectory(prefix="prime-kernels-wheel-") as folder:
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
        command += ["--no-deps", "--only-binary=:all:", "--platform", WHEEL_PLATFORM, "--dest", folder]
        command += [f"{WHEEL_PROJECT}=={WHEEL_VERSION}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(folder).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            said = "\n".join((result.stderr or result.stdout).strip().splitlines()[-4:])
            raise VendorError(
                f"pip could not fetch {WHEEL_PROJECT}=={WHEEL_VERSION} (status {result.returncode}):\n"
                f"{said}\nCheck the network and pip's index, or get that wheel elsewhere and set "
                f"{WHEEL_ENV}=FILE."
            )
        return wheels[0].read_bytes()


def read_headers(wheel: zipfile.ZipFile) -> dict[str, bytes]:
    """Include path -> bytes, of the headers to keep."""
    files = {
        entry[len(WHEEL_INCLUDE) :]: wheel.read(entry)
        for entry in wheel.namelist()
        if entry.startswith(tuple(WHEEL_INCLUDE + tree for tree in TREES)) and not entry.endswith("/")
    }
    todo = [name for name in files if name.startswith(ROOT_TREE) or name in ROOT_FILES]
    kept: dict[str, bytes] = {}
    while todo:
        name = todo.pop()
        if name in kept:
            continue
        kept[name] = files[name]
        for target in INCLUDE_LINE.findall(files[name].decode("utf-8", errors="replace")):
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
            todo += [found for found in (target, beside) if found in files]
    return dict(sorted(kept.items()))


# --- public names and licences --------------------------------------------------------------------


class ModuleNames:
    """The public names of the wheel's Python package, read from its source without importing it."""

    def __init__(self, wheel: zipfile.ZipFile) -> None:
        self.bodies: dict[str, list[ast.stmt]] = {}
        self.packages: set[str] = set()
        for entry in wheel.namelist():
            if not (entry.startswith(WHEEL_PACKAGE) and entry.endswith(".py")):
                continue
            module = entry[len(WHEEL_PACKAGE) : -len(".py")].replace("/", ".")
            if module.split(".")[-1] == "__init__":
                module = module.removesuffix("__init__").rstrip(".")
                self.packages.add(module)
            self.bodies[module] = ast.parse(wheel.read(entry).decode("utf-8")).body

    def sibling(self, module: str, node: ast.ImportFrom) -> str:
        """The module a relative import names."""
        base = module.split(".") if module else []
        up = node.level - (module in self.packages)
        parts = base[: len(base) - up] + (node.module.split(".") if node.module else [])
        return ".".join(parts)

    def of(self, module: str) -> set[str]:
        """What a module binds at its top level, also inside try and if, and through star imports."""
        names: set[str] = set()
        todo = list(self.bodies[module])
        for node in todo:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, (ast.Try, ast.If)):
                todo += node.body
            elif isinstance(node, ast.ImportFrom) and node.level > 0:
                source = self.sibling(module, node)
                if source not in self.bodies:
                    continue  # an optional module that this wheel does not have
                for alias in node.names:
                    names |= self.of(source) if alias.name == "*" else {alias.asname or alias.name}
        return {name for name in names if not name.startswith("_")}

    def table(self) -> dict[str, list[str]]:
        """Module path inside the package ("" is the package itself) -> its public names."""
        return {module: sorted(self.of(module)) for module in sorted(self.bodies)}


def first_comment(text: str) -> str:
    """The comment a header starts with, without comment signs: where CUTLASS states its licence."""
    text = text.lstrip()
    if text.startswith("/*"):
        lines = [line.strip().strip("*").strip() for line in text[2 : text.find("*/")].splitlines()]
    else:
        lines = []
        for line in text.splitlines():
            if not line.startswith("//"):
                break
            lines.append(line.lstrip("/").strip())
    return "\n".join(lines).strip()


def third_party_notices(files: dict[str, bytes]) -> str:
    """Every licence notice that the kept headers carry, once each, with the files it covers."""
    covered: dict[str, list[str]] = {}
    for name, data in files.items():
        comment = first_comment(data.decode("utf-8", errors="replace"))
        if "copyright" in comment.lower():
            covered.setdefault(comment, []).append(name)
    parts = ["Licence notices of the vendored headers, collected from them when they were vendored."]
    for notice, names in covered.items():
        parts.append("\n".join([NOTICE_RULE, *names, NOTICE_RULE, notice]))
    return "\n\n".join(parts) + "\n"


# --- the folder -----------------------------------------------------------------------------------


def inputs_of(patches: list[Patch]) -> dict[str, Any]:
    """What decides the content of the folder: equal inputs mean equal folders."""
    scripts = (Path(__file__), Path(__file__).with_name("header_patch.py"))
    return {
        "format": MANIFEST_FORMAT,
        "wheel": {"project": WHEEL_PROJECT, "version": WHEEL_VERSION, "sha256": WHEEL_SHA256},
        "patches": {patch.name: patch.digest for patch in patches},
        "scripts": {path.name: sha256(path.read_bytes()) for path in scripts},
    }


def read_manifest(target: Path) -> dict[str, Any]:
    """The manifest of a complete folder; VendorError for one that is half-written or was edited."""
    advice = f"Save what you need from it, then run scripts/{Path(__file__).name} --force to write it anew."
    try:
        manifest = json.loads((target / "manifest.json").read_text("utf-8"))
        stated = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise VendorError(f"{target} is half-written: no usable manifest.json ({error}). {advice}") from error
    found = {
        path.relative_to(target).as_posix(): sha256(path.read_bytes())
        for path in target.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    wrong = sorted(name for name in stated.keys() | found.keys() if stated.get(name) != found.get(name))
    if wrong:
        raise VendorError(
            f"{target} does not match its manifest: {len(wrong)} files are missing, extra or changed, "
            f"the first is {wrong[0]}. {advice}"
        )
    return dict(manifest)


def write_tree(folder: Path, wheel: zipfile.ZipFile, patches: list[Patch]) -> None:
    """Write a complete vendor folder at `folder`, which must not exist."""
    headers = read_headers(wheel)
    notices = third_party_notices(headers)
    for patch in patches:
        patch.apply(headers)
    content = {f"include/{name}": data for name, data in headers.items()}
    content["licenses/LICENSE.deepgemm"] = wheel.read(WHEEL_LICENCE)
    content["licenses/THIRD_PARTY_NOTICES.txt"] = notices.encode("utf-8")
    manifest = {
        "inputs": inputs_of(patches),
        "patched": sorted({patch.file for patch in patches}),
        "names": ModuleNames(wheel).table(),
        "files": {name: sha256(data) for name, data in sorted(content.items())},
    }
    content["manifest.json"] = (json.dumps(manifest, indent=1) + "\n").encode("utf-8")
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """One vendoring at a time for one target; the lock dies with its process."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def staging(target: Path) -> tuple[Path, Path]:
    """Where the new tree grows and where the old one waits while they change places."""
    return target.parent / f".{target.name}.new", target.parent / f".{target.name}.old"


def heal(target: Path) -> None:
    """Undo what a killed run left: bring a moved folder back, drop an unfinished one."""
    new, old = staging(target)
    if old.exists() and not target.exists():
        os.rename(old, target)
    for leftover in (new, old):
        if leftover.exists():
            shutil.rmtree(leftover)


def vendor(target: Path = TARGET, patches: Path = PATCHES, force: bool = False) -> bool:
    """Bring `target` up to date; False when there was nothing to do.

    Raises VendorError, with the old folder untouched, for a wheel that is wrong or cannot be had, for a patch
    that does not fit, and (unless `force`) for a folder that does not match its own manifest.
    """
    found = read_patches(patches)
    with locked(target):
        heal(target)
        if target.exists() and not force and read_manifest(target)["inputs"] == inputs_of(found):
            return False
        new, old = staging(target)
        try:
            write_tree(new, read_wheel(), found)
            if target.exists():
                os.rename(target, old)
            # A run killed between the two renames is mended by the heal() of the next.
            os.rename(new, target)
        finally:
            heal(target)
        return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fill prime_kernels/_vendor from the pinned DeepGEMM wheel.")
    parser.add_argument("--target", type=Path, default=TARGET, help="folder to write (default: %(default)s)")
    parser.add_argument("--patches", type=Path, default=PATCHES, help="patches (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="write the folder anew, also when it is damaged")
    parser.add_argument("--seal", action="store_true", help="write base and result of each patch first")
    options = parser.parse_args(argv)
    try:
        if options.seal:
            for name in seal_patches(options.patches, read_headers(read_wheel())):
                print(f"sealed {name}")
        changed = vendor(options.target, options.patches, options.force)
    except VendorError as error:
        print(f"vendoring failed: {error}", file=sys.stderr)
        return 1
    print(f"{options.target}: {'written' if changed else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
