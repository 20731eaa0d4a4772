"""What a key covers: every header a kernel can include, by content; never where things are installed."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from jit_helpers import tiny_source

from prime_kernels.jit import (
    KernelSource,
    Toolchain,
    ToolchainError,
    compile_kernel,
    find_toolchain,
    headers,
    keys,
    toolchain,
)
from prime_kernels.jit.compiler import compile_image
from prime_kernels.jit.headers import parse_includes, scan

CLOCK_TICK_SECONDS = 0.05
NO_HEADERS = Toolchain(nvrtc_version=(13, 0), build="libnvrtc.so.13:1", include_dirs=())


def write(directory: Path, **files: str) -> Path:
    """Writes `a__b_h="..."` as a/b.h."""
    for name, text in files.items():
        path = directory / f"{name.replace('__', '/').removesuffix('_h')}.h"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


def edit_unseen(path: Path, old: str, new: str) -> None:
    """Changes a file and restores its size and time stamps as far as a program can."""
    before = path.stat()
    text = path.read_text()
    assert len(old) == len(new)
    assert old in text
    path.write_text(text.replace(old, new))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_header_edited_in_place_changes_the_key(tmp_path):
    write(tmp_path, value_h='#include "deep/inner.h"\n', deep__inner_h="#define VALUE 1\n")
    source = tiny_source(include_dir=tmp_path)
    first = keys.source_key(source), keys.cache_key(source, NO_HEADERS)
    assert first == (keys.source_key(source), keys.cache_key(source, NO_HEADERS))
    edit_unseen(tmp_path / "deep" / "inner.h", "VALUE 1", "VALUE 2")
    second = keys.source_key(source), keys.cache_key(source, NO_HEADERS)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_header_edited_after_it_was_remembered_changes_the_key(tmp_path, monkeypatch):
    """The memo of parsed headers must notice an edit that keeps size and mtime."""
    monkeypatch.setattr(headers, "_SETTLED_NS", -1)
    write(tmp_path, value_h="#define VALUE 1\n")
    source = tiny_source(include_dir=tmp_path)
    first = keys.source_key(source)
    # Longer than a tick of the clock that stamps files.
    time.sleep(CLOCK_TICK_SECONDS)
    edit_unseen(tmp_path / "value.h", "VALUE 1", "VALUE 2")
    assert keys.source_key(source) != first


@pytest.mark.compile
def test_compiled_kernel_follows_the_edit(tmp_path):
    directory = write(tmp_path / "include", value_h="#define VALUE 17\n")
    source = tiny_source(include_dir=directory)
    before = compile_kernel(source, cache_dir=tmp_path / "cache")
    edit_unseen(directory / "value.h", "17", "23")
    after = compile_kernel(source, cache_dir=tmp_path / "cache")
    assert (before.origin, after.origin) == ("compiled", "compiled")
    assert before.data != after.data
    edit_unseen(directory / "value.h", "23", "17")
    again = compile_kernel(source, cache_dir=tmp_path / "cache")
    assert again.origin == "cache"
    assert again.data == before.data


def test_every_part_of_a_source_is_in_the_key():
    base = tiny_source()
    variants = [
        base,
        dataclasses.replace(base, code=base.code + "\n"),
        dataclasses.replace(base, entry="&tiny"),
        dataclasses.replace(base, arch="sm_100a"),
        dataclasses.replace(base, options=("-DA=1",)),
        dataclasses.replace(base, options=("-DA=1", "-DB=1")),
        dataclasses.replace(base, options=("-DA=1-DB=1",)),
    ]
    assert len({keys.source_key(source) for source in variants}) == len(variants)
    assert keys.source_key(dataclasses.replace(base, name="other")) == keys.source_key(base)


def test_compiler_version_is_in_the_cache_key_only():
    source = tiny_source()
    toolchains = [
        NO_HEADERS,
        dataclasses.replace(NO_HEADERS, nvrtc_version=(12, 9)),
        dataclasses.replace(NO_HEADERS, build="libnvrtc.so.13:2"),
    ]
    cache_keys = {keys.cache_key(source, chain) for chain in toolchains}
    assert len(cache_keys) == len(toolchains)
    assert keys.source_key(source) not in cache_keys


def test_cuda_headers_are_in_the_cache_key_only(tmp_path):
    write(tmp_path, cuda_device_runtime_api_h="#define X 1\n")
    chain = dataclasses.replace(NO_HEADERS, include_dirs=(tmp_path,))
    source = tiny_source()
    before = keys.source_key(source), keys.cache_key(source, chain)
    edit_unseen(tmp_path / "cuda_device_runtime_api.h", "1", "2")
    after = keys.source_key(source), keys.cache_key(source, chain)
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_keys_do_not_depend_on_where_headers_are(tmp_path):
    contents = {"value_h": '#include "deep/inner.h"\n', "deep__inner_h": "#define VALUE 1\n"}
    here = write(tmp_path / "here", **contents)
    there = write(tmp_path / "there" / "and a space", **contents)
    assert keys.source_key(tiny_source(include_dir=here)) == keys.source_key(tiny_source(include_dir=there))


def test_header_that_appears_in_an_earlier_directory_changes_the_key(tmp_path):
    late = write(tmp_path / "late", value_h="#define VALUE 1\n")
    early = tmp_path / "early"
    early.mkdir()
    source = dataclasses.replace(tiny_source(include_dir=late), include_dirs=(str(early), str(late)))
    before = keys.source_key(source)
    write(early, value_h="#define VALUE 3\n")
    assert keys.source_key(source) != before


def test_a_missing_header_that_appears_changes_the_key(tmp_path):
    source = tiny_source(include_dir=tmp_path)
    before = keys.source_key(source)
    write(tmp_path, value_h="#define VALUE 1\n")
    assert keys.source_key(source) != before


def test_scan_follows_relative_quoted_and_angled_includes(tmp_path):
    write(
        tmp_path,
        top_h='#include "a/one.h"\n#  include   <two.h>\n\t#include <absent.h>\n',
        a__one_h='#include "sibling.h"\n#include "../two.h"\n',
        a__sibling_h='#if 0\n#include "guarded.h"\n#endif\n',
        a__guarded_h="",
        two_h='#include "top.h"\n',
    )
    found = scan('#include "top.h"\n', [], [tmp_path], [tmp_path])
    assert sorted(header.name for header in found.headers) == [
        "a/guarded.h",
        "a/one.h",
        "a/sibling.h",
        "top.h",
        "two.h",
    ]
    assert found.unresolved == ("absent.h",)


def test_include_through_a_macro_is_refused_in_own_headers(tmp_path):
    write(tmp_path, value_h="#include OTHER_HEADER\n")
    with pytest.raises(ValueError, match=r"value\.h: #include OTHER_HEADER"):
        keys.source_key(tiny_source(include_dir=tmp_path))
    with pytest.raises(ValueError, match="through a macro"):
        scan("#include WHAT\n", [], [tmp_path], [tmp_path])


def test_the_standard_header_macro_of_cutlass_is_understood():
    includes, computed = parse_includes(b"#include CUDA_STD_HEADER(cstdint)\n")
    assert [include.name for include in includes] == ["cuda/std/cstdint"]
    assert computed == ()


@pytest.mark.parametrize("option", ["-Isomewhere", "--include-path=x", "-include=x", "--pre-include=x"])
def test_options_that_bring_unseen_files_are_refused(option):
    with pytest.raises(ValueError, match="include_dirs"):
        dataclasses.replace(tiny_source(), options=(option,))


def test_source_arguments_are_checked():
    with pytest.raises(ValueError, match=r"sm_80.*sm_90a, sm_100a"):
        KernelSource("tiny", "", "tiny", "sm_80")
    with pytest.raises(ValueError, match="letters, digits"):
        KernelSource("../tiny", "", "tiny", "sm_90a")


def test_vendored_headers_that_were_never_made(tmp_path, monkeypatch):
    shims, own, _ = toolchain.package_include_dirs()
    for module in (headers, keys):
        monkeypatch.setattr(module, "package_include_dirs", lambda: (shims, own, tmp_path / "absent"))
    source = KernelSource("gemm", "#include <deep_gemm/impls/sm90_bf16_gemm.cuh>\n", "x", "sm_90a")
    with pytest.raises(ToolchainError, match=r"scripts/vendor_deepgemm\.py"):
        keys.source_key(source)
    with pytest.raises(ToolchainError, match="install the package with pip"):
        keys.cache_key(source, NO_HEADERS)


@pytest.mark.compile
def test_compiler_sees_what_was_hashed_and_no_paths(tmp_path):
    """Own headers, relative includes among them, reach the compiler under their names."""
    directory = write(
        tmp_path / "somewhere",
        value_h='#include "deep/file.h"\n#define VALUE (int)(long)where()\n',
        deep__file_h='#pragma once\n#include "sibling.h"\n#include "../deep/sibling.h"\n',
        deep__sibling_h="#pragma once\n__device__ const char* where() { return __FILE__; }\n",
    )
    source = tiny_source(include_dir=directory)
    found = headers.all_headers(source, find_toolchain())
    image = compile_image(source, find_toolchain(), found)
    assert b"deep/sibling.h" in image.data
    assert str(tmp_path).encode() not in image.data
    assert "Compile time" not in image.log
    (directory / "value.h").write_text("#define VALUE 2\n")
    with pytest.raises(RuntimeError, match=r"value\.h was edited while kernel 'tiny'"):
        compile_image(source, find_toolchain(), found)


def test_two_headers_of_one_name_are_refused(tmp_path):
    first = write(tmp_path / "first", value_h="#include <other.h>\n")
    second = write(tmp_path / "second", other_h='#include "value.h"\n', value_h="")
    source = dataclasses.replace(tiny_source(include_dir=first), include_dirs=(str(first), str(second)))
    with pytest.raises(ValueError, match=r"two headers called value\.h"):
        headers.embedded_headers(source, headers.own_headers(source))
