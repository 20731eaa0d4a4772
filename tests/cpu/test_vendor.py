"""Vendoring: what is taken from the wheel, what is refused, and that failures leave the old folder alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

REPO = Path(__file__).resolve().parents[2]
SCRIPT = REPO / "scripts" / "vendor_deepgemm.py"

HEADERS = {
    "deep_gemm/impls/kernel.cuh": '#include <deep_gemm/common.cuh>\n  #  include "local.cuh"\nvoid f();\n',
    "deep_gemm/impls/local.cuh": "#pragma once\n",
    "deep_gemm/common.cuh": "one\ntwo\n#include <cutlass/used.h>\nfour\n",
    "cute/tensor.hpp": '/****\n * Copyright (c) Example Corp\n *\n **/\n#include "deep/inner.hpp"\n',
    "cute/deep/inner.hpp": "// Copyright (c) Other\n// More.\nint inner;\n",
    "cute/unused.hpp": "#include <cutlass/unused.h>\n",
    "cutlass/used.h": "\n// Copyright (c) Other\n// More.\n#pragma once\n",
    "cutlass/unused.h": "#pragma once\n",
    "other/tree.h": "#pragma once\n",
}
MODULES = {
    "__init__.py": (
        "import os\nfrom . import utils\nfrom .utils import *\nfrom .optional import gone\n_private = 1\n"
        "try:\n    def gemm(a): pass\n    gemm_alias = gemm\nexcept AttributeError:\n    pass\n"
        "class Buffer: pass\n"
    ),
    "utils/__init__.py": "from .math import *\nfrom ..epilogue import Alpha as Renamed\n",
    "utils/math.py": "def align(a, b): pass\ndef _hidden(): pass\n",
    "epilogue.py": "class Alpha: pass\n",
}


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vendor_deepgemm_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


vendor = load_script()


def write_wheel(path: Path, headers: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in headers.items():
            wheel.writestr(f"deep_gemm/include/{name}", text)
        for name, text in MODULES.items():
            wheel.writestr(f"deep_gemm/{name}", text)
        wheel.writestr(vendor.WHEEL_LICENCE, "the licence of the headers\n")
    return path


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the pinned wheel, pinned by its own hash."""
    path = write_wheel(tmp_path / "stand_in.whl", HEADERS)
    monkeypatch.setattr(vendor, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv(vendor.WHEEL_ENV, str(path))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "package" / "_vendor"


@pytest.fixture
def patches(tmp_path: Path) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file beside and below `folder`, but for the lock."""
    return {
        path.relative_to(folder.parent).as_posix(): path.read_bytes()
        for path in folder.parent.rglob("*")
        if path.is_file() and not path.name.endswith(".lock")
    }


def patch_text(edits: str, file: str = "deep_gemm/common.cuh", head: str = "") -> str:
    return f"# because\nfile {file}\n{head}{edits}"


def test_writes_reachable_headers_licences_and_names(wheel: Path, target: Path, patches: Path) -> None:
    assert vendor.vendor(target, patches) is True
    found = {path.relative_to(target / "include").as_posix() for path in (target / "include").rglob("*.*")}
    assert found == set(HEADERS) - {"cute/unused.hpp", "cutlass/unused.h", "other/tree.h"}
    for name in found:
        assert (target / "include" / name).read_text() == HEADERS[name]
    assert (target / "licenses" / "LICENSE.deepgemm").read_text() == "the licence of the headers\n"
    manifest = json.loads((target / "manifest.json").read_text())
    assert manifest["names"] == {
        "": ["Buffer", "Renamed", "align", "gemm", "gemm_alias", "utils"],
        "epilogue": ["Alpha"],
        "utils": ["Renamed", "align"],
        "utils.math": ["align"],
    }
    assert manifest["inputs"]["wheel"]["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert manifest["patched"] == []


def test_each_licence_notice_is_kept_once_with_its_files(wheel: Path, target: Path, patches: Path) -> None:
    vendor.vendor(target, patches)
    notices = (target / "licenses" / "THIRD_PARTY_NOTICES.txt").read_text().split(vendor.NOTICE_RULE)
    texts = [text.strip() for text in notices[1:]]
    assert texts == [
        "cute/deep/inner.hpp\ncutlass/used.h",
        "Copyright (c) Other\nMore.",
        "cute/tensor.hpp",
        "Copyright (c) Example Corp",
    ]


def test_second_run_does_nothing_and_needs_no_wheel(wheel: Path, target: Path, patches: Path) -> None:
    vendor.vendor(target, patches)
    before = snapshot(target)
    stamp = (target / "manifest.json").stat().st_mtime_ns
    wheel.unlink()
    assert vendor.vendor(target, patches) is False
    assert snapshot(target) == before
    assert (target / "manifest.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("had_old", [False, True])
def test_wrong_wheel_is_refused(
    wheel: Path, target: Path, patches: Path, monkeypatch: pytest.MonkeyPatch, had_old: bool
) -> None:
    if had_old:
        vendor.vendor(target, patches)
    before = snapshot(target)
    monkeypatch.setattr(vendor, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(vendor.VendorError, match=f"wrong wheel .*stand_in.whl.*{'0' * 64}"):
        vendor.vendor(target, patches)
    assert snapshot(target) == before
    assert target.exists() == had_old


def test_unreadable_local_wheel_is_named(wheel: Path, target: Path, patches: Path) -> None:
    wheel.unlink()
    with pytest.raises(
        vendor.VendorError, match=r"PRIME_KERNELS_DEEPGEMM_WHEEL=.*stand_in.whl cannot be read"
    ):
        vendor.vendor(target, patches)
    assert not target.exists()


def test_without_network_pip_says_why_and_the_old_folder_stays(
    wheel: Path, target: Path, patches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor.vendor(target, patches)
    before = snapshot(target)
    monkeypatch.delenv(vendor.WHEEL_ENV)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(vendor, "MANIFEST_FORMAT", vendor.MANIFEST_FORMAT + 1)
    with pytest.raises(vendor.VendorError) as caught:
        vendor.vendor(target, patches)
    message = str(caught.value)
    assert "pip could not fetch sgl-deep-gemm==0.2.5" in message
    assert "No matching distribution found" in message, "what pip said is missing"
    assert "set PRIME_KERNELS_DEEPGEMM_WHEEL=FILE" in message
    assert snapshot(target) == before


def damage_delete(target: Path) -> str:
    (target / "include/cutlass/used.h").unlink()
    return "include/cutlass/used.h"


def damage_edit(target: Path) -> str:
    (target / "include/deep_gemm/common.cuh").write_text("edited by hand\n")
    return "include/deep_gemm/common.cuh"


def damage_add(target: Path) -> str:
    (target / "include/cute/extra.hpp").write_text("")
    return "include/cute/extra.hpp"


def damage_manifest(target: Path) -> str:
    (target / "manifest.json").unlink()
    return "half-written"


def damage_truncate(target: Path) -> str:
    (target / "manifest.json").write_text('{"inputs": ')
    return "half-written"


@pytest.mark.parametrize(
    "damage",
    [damage_delete, damage_edit, damage_add, damage_manifest, damage_truncate],
    ids=lambda f: f.__name__,
)
def test_damaged_folder_is_an_error_until_forced(
    wheel: Path, target: Path, patches: Path, damage: Callable[[Path], str]
) -> None:
    vendor.vendor(target, patches)
    whole = snapshot(target)
    said = damage(target)
    damaged = snapshot(target)
    with pytest.raises(vendor.VendorError, match=f"{re.escape(said)}.*--force"):
        vendor.vendor(target, patches)
    assert snapshot(target) == damaged
    assert vendor.vendor(target, patches, force=True) is True
    assert snapshot(target) == whole


def test_failed_rename_brings_the_old_folder_back(
    wheel: Path, target: Path, patches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vendor.vendor(target, patches)
    before = snapshot(target)
    rename = os.rename

    def failing(source: Path, destination: Path) -> None:
        if Path(source).name.endswith(".new"):
            raise OSError("disk on fire")
        rename(source, destination)

    monkeypatch.setattr(vendor.os, "rename", failing)
    with pytest.raises(OSError, match="disk on fire"):
        vendor.vendor(target, patches, force=True)
    assert snapshot(target) == before


def test_leftovers_of_a_killed_run_are_healed(wheel: Path, target: Path, patches: Path) -> None:
    vendor.vendor(target, patches)
    before = snapshot(target)
    new, old = vendor.staging(target)
    (new / "include").mkdir(parents=True)
    (new / "include" / "half.h").write_text("")
    target.rename(old)  # as if killed between the two renames
    wheel.unlink()
    assert vendor.vendor(target, patches) is False
    assert snapshot(target) == before


def test_parallel_runs_write_once(wheel: Path, target: Path, patches: Path) -> None:
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda: results.append(vendor.vendor(target, patches))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, False, False, True]
    vendor.read_manifest(target)


def test_a_new_patch_rewrites_the_folder(wheel: Path, target: Path, patches: Path) -> None:
    vendor.vendor(target, patches)
    (patches / "0001-why.patch").write_text(patch_text("@ replace 2 2\n+TWO\n+and more\n@ delete 4 4\n"))
    vendor.seal_patches(patches, vendor.read_headers(vendor.read_wheel()))
    assert vendor.vendor(target, patches) is True
    text = (target / "include/deep_gemm/common.cuh").read_text()
    assert text == "one\nTWO\nand more\n#include <cutlass/used.h>\n"
    manifest = vendor.read_manifest(target)
    assert manifest["patched"] == ["deep_gemm/common.cuh"]
    assert list(manifest["inputs"]["patches"]) == ["0001-why.patch"]
    assert vendor.vendor(target, patches) is False


def test_two_patches_on_one_file_stack(wheel: Path, target: Path, patches: Path) -> None:
    (patches / "0001-first.patch").write_text(patch_text("@ after 0\n+zero\n"))
    (patches / "0002-second.patch").write_text(patch_text("@ replace 1 2\n+0 and 1\n"))
    headers = vendor.read_headers(vendor.read_wheel())
    assert vendor.seal_patches(patches, headers) == ["0001-first.patch", "0002-second.patch"]
    assert vendor.seal_patches(patches, headers) == []
    vendor.vendor(target, patches)
    assert (target / "include/deep_gemm/common.cuh").read_text().startswith("0 and 1\ntwo\n")


def sealed_patch(patches: Path, edits: str) -> object:
    (patches / "0001-why.patch").write_text(patch_text(edits))
    vendor.seal_patches(patches, {"deep_gemm/common.cuh": b"one\ntwo\n"})
    return vendor.read_patches(patches)[0]


def test_applying_twice_is_an_error(patches: Path) -> None:
    patch = sealed_patch(patches, "@ after 1\n+new\n")
    files = {"deep_gemm/common.cuh": b"one\ntwo\n"}
    patch.apply(files)
    assert files == {"deep_gemm/common.cuh": b"one\nnew\ntwo\n"}
    with pytest.raises(vendor.VendorError, match=r"0001-why.patch: already applied to deep_gemm/common.cuh"):
        patch.apply(files)
    assert files == {"deep_gemm/common.cuh": b"one\nnew\ntwo\n"}


def test_wrong_base_is_an_error(patches: Path) -> None:
    patch = sealed_patch(patches, "@ after 1\n+new\n")
    files = {"deep_gemm/common.cuh": b"one\ntwo!\n"}
    with pytest.raises(vendor.VendorError, match=r"wrong base. deep_gemm/common.cuh has SHA-256"):
        patch.apply(files)
    assert files == {"deep_gemm/common.cuh": b"one\ntwo!\n"}
    with pytest.raises(vendor.VendorError, match="not among the vendored headers"):
        patch.apply({})


def test_a_patch_changed_without_sealing_is_an_error(wheel: Path, target: Path, patches: Path) -> None:
    vendor.vendor(target, patches)
    before = snapshot(target)
    path = patches / "0001-why.patch"
    path.write_text(patch_text("@ after 1\n+new\n"))
    vendor.seal_patches(patches, vendor.read_headers(vendor.read_wheel()))
    path.write_text(path.read_text().replace("+new", "+newer"))
    with pytest.raises(vendor.VendorError, match="Seal a changed patch"):
        vendor.vendor(target, patches)
    assert snapshot(target) == before


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ("+orphan\n", r":3: a \+ line before the first edit"),
        ("@ after\n", ":3: an edit is"),
        ("@ move 1 2\n", ":3: an edit is"),
        ("@ delete 3 2\n", ":3: an edit is"),
        ("@ replace 0 2\n", ":3: an edit is"),
        ("@ after x\n", ":3: invalid literal"),
        ("@ replace 2 3\n@ after 2\n", ":4: edits must rise and not overlap"),
        ("note without hash sign\n", ":3: unknown keyword 'note'"),
        ("@ after 1\n+x\n", "needs a reason, file, base, result and edits"),
        ("base 1\nresult 2\n", "needs a reason, file, base, result and edits"),
    ],
)
def test_unreadable_patches_are_named_by_line(edits: str, said: str) -> None:
    with pytest.raises(vendor.VendorError, match=f"patches/0001-x.patch.*{said}"):
        vendor.Patch("0001-x.patch", patch_text(edits).encode())


def test_a_patch_past_the_end_is_an_error(patches: Path) -> None:
    with pytest.raises(vendor.VendorError, match="has 3 lines, the last edit is at line 9"):
        sealed_patch(patches, "@ delete 9 9\n")


LINES = st.lists(st.sampled_from(["a", "b", "", " @ x", "+y", "# z"]), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(base=LINES, data=st.data())
def test_edits_equal_a_line_by_line_application(base: list[str], data: st.DataObject) -> None:
    """An independent application: each base line is kept or dropped on its own, insertions sit between."""
    keep = data.draw(st.lists(st.booleans(), min_size=len(base), max_size=len(base)))
    before = data.draw(st.lists(LINES | st.just([]), min_size=len(base) + 1, max_size=len(base) + 1))
    expected: list[str] = []
    edits = []
    for index in range(len(base) + 1):
        expected += before[index]
        if before[index]:
            edits.append("\n".join([f"@ after {index}", *(f"+{line}" for line in before[index])]))
        if index < len(base):
            if keep[index]:
                expected.append(base[index])
            else:
                edits.append(f"@ delete {index + 1} {index + 1}")
    assume(edits)
    text = "# why\nfile f\nbase -\nresult -\n" + "\n".join(edits) + "\n"
    patched = vendor.Patch("0001-x.patch", text.encode()).edited("\n".join(base).encode())
    assert patched == "\n".join(expected).encode()


def test_command_line_reports_failures_without_a_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, vendor.WHEEL_ENV: str(SCRIPT)}
    result = subprocess.run(
        [sys.executable, SCRIPT, "--target", tmp_path / "_vendor"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.startswith("vendoring failed: wrong wheel")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "_vendor").exists()


# --- this checkout --------------------------------------------------------------------------------


def test_the_checkout_is_vendored_with_its_own_patches() -> None:
    manifest = vendor.read_manifest(vendor.TARGET)
    assert manifest["inputs"] == vendor.inputs_of(vendor.read_patches(vendor.PATCHES))
    assert manifest["patched"], "the patches that NVRTC needs are missing"


def test_every_vendored_include_of_ours_exists() -> None:
    """Pruning keeps what DeepGEMM reaches; a header of ours may not need more than that."""
    package = REPO / "prime_kernels"
    sources = [*(package / "include").rglob("*"), *package.rglob("*.py")]
    wanted = set()
    for path in sources:
        if path.is_file() and "_vendor" not in path.parts:
            wanted |= set(re.findall(r"#include\s*<((?:deep_gemm|cute|cutlass)/[^>{}]+)>", path.read_text()))
    assert wanted, "no vendored header is included anywhere"
    assert [name for name in sorted(wanted) if not (vendor.TARGET / "include" / name).is_file()] == []


def test_patches_carry_no_line_of_the_vendored_headers() -> None:
    ours: set[str] = set()
    for patch in vendor.read_patches(vendor.PATCHES):
        ours |= {line.strip() for _, _, new in patch.edits for line in new}
    # Preprocessor lines and braces are the language's, not anybody's.
    ours = {
        line for line in ours if len(line) > 8 and not line.startswith(("#if", "#endif", "#else", "#pragma"))
    }
    assert ours
    manifest = vendor.read_manifest(vendor.TARGET)
    for name in manifest["files"]:
        if name.startswith("include/") and name.removeprefix("include/") not in manifest["patched"]:
            text = (vendor.TARGET / name).read_text("utf-8", errors="replace")
            assert ours.isdisjoint(line.strip() for line in text.splitlines()), name
