"""The kernel cache: what is stored, who compiles, and what happens when the directory misbehaves."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
import warnings
from pathlib import Path

import pytest
from jit_helpers import TINY_IN_CHILD, finish, obey_permissions, run_python, start_python, tiny_source

from prime_kernels.jit import CACHE_DIR_VARIABLE, CacheWarning, KernelCache, cache, compile_kernel

pytestmark = pytest.mark.compile

POLL_SECONDS = 0.02
WAIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_unstored", {})
    monkeypatch.setattr(cache, "_warned", set())


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(POLL_SECONDS)


def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    compiled: list[str] = []
    real = cache.compile_uncached

    def counting(source, toolchain, headers):
        compiled.append(source.name)
        return real(source, toolchain, headers)

    monkeypatch.setattr(cache, "compile_uncached", counting)
    return compiled


@pytest.mark.parametrize("folder", ["plain", "with spaces and ünïcode"])
def test_second_request_comes_from_the_directory(tmp_path, monkeypatch, folder):
    compiled = count_compiles(monkeypatch)
    directory = tmp_path / folder / "nested"
    first = compile_kernel(tiny_source(), cache_dir=directory)
    second = compile_kernel(tiny_source(), cache_dir=directory)
    assert compiled == ["tiny"]
    assert (first.origin, second.origin) == ("compiled", "cache")
    assert first.path == second.path
    assert second.path is not None
    assert second.path.parent == directory
    assert second.path.read_bytes() == second.data == first.data
    assert second.symbol == first.symbol == "tiny"
    assert second.resources == first.resources
    assert second.log == first.log
    leftovers = {p.suffix for p in directory.iterdir() if not p.name.startswith(cache.TEMPORARY_PREFIX)}
    assert leftovers <= {".cubin", ".json", ".lock"}
    assert not list(directory.glob(f"{cache.TEMPORARY_PREFIX}*"))


def test_directory_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "chosen"))
    assert cache.default_cache_dir() == tmp_path / "chosen"
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_cache_dir() == tmp_path / "xdg" / "prime_kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.default_cache_dir() == tmp_path / "home" / ".cache" / "prime_kernels"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache.default_cache_dir() == Path("/.cache/prime_kernels")


def test_one_process_compiles_while_the_others_wait(tmp_path):
    child = (
        TINY_IN_CHILD
        + """
import os, pathlib, sys, time
work, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
real = cache.compile_uncached
def slow(*arguments):
    with open(work / "compiles", "a") as log:
        log.write(f"{os.getpid()}\\n")
    time.sleep(1.0)
    return real(*arguments)
cache.compile_uncached = slow
(work / f"ready-{os.getpid()}").touch()
while len(list(work.glob("ready-*"))) < count:
    time.sleep(0.01)
print(compile_kernel(SOURCE, cache_dir=work / "cache").origin)
"""
    )
    count = 2
    processes = [start_python(child, tmp_path, str(count)) for _ in range(count)]
    origins = sorted(finish(process)[0].strip() for process in processes)
    assert origins == ["cache", "compiled"]
    assert len((tmp_path / "compiles").read_text().splitlines()) == 1


def kill_when_there(started: Path, code: str, directory: Path) -> None:
    """Run `code`, whose arguments are `directory` and `started`, and kill it once it has made the latter."""
    process = start_python(code, directory, started)
    wait_for(started)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_killed_compile_leaves_nothing_and_blocks_nobody(tmp_path):
    child = (
        TINY_IN_CHILD
        + """
import pathlib, sys, time
def hang(*arguments):
    pathlib.Path(sys.argv[2]).touch()
    time.sleep(3600)
cache.compile_uncached = hang
compile_kernel(SOURCE, cache_dir=pathlib.Path(sys.argv[1]))
"""
    )
    directory, started = tmp_path / "cache", tmp_path / "started"
    kill_when_there(started, child, directory)
    assert KernelCache(directory).entries() == []
    assert not list(directory.glob("*.cubin"))
    cubin = compile_kernel(tiny_source(), cache_dir=directory)
    assert cubin.origin == "compiled"
    assert KernelCache(directory).entries() == [cubin.path]


def test_killed_store_is_compiled_again(tmp_path):
    """Killed between the two files of an entry, and in the middle of writing one of them."""
    child = (
        TINY_IN_CHILD
        + """
import os, pathlib, sys, time
real, calls = os.replace, []
def replace(source, target):
    calls.append(target)
    if len(calls) == 2:
        pathlib.Path(sys.argv[2]).touch()
        time.sleep(3600)
    real(source, target)
os.replace = replace
compile_kernel(SOURCE, cache_dir=pathlib.Path(sys.argv[1]))
"""
    )
    directory, started = tmp_path / "cache", tmp_path / "started"
    kill_when_there(started, child, directory)
    assert len(list(directory.glob("*.cubin"))) == 1
    assert KernelCache(directory).entries() == []
    (temporary,) = directory.glob(f"{cache.TEMPORARY_PREFIX}*")
    old = time.time() - 2 * cache.STALE_TEMPORARY_SECONDS
    os.utime(temporary, (old, old))
    assert compile_kernel(tiny_source(), cache_dir=directory).origin == "compiled"
    assert len(KernelCache(directory).entries()) == 1
    assert not temporary.exists()


@pytest.mark.parametrize(
    "damage", ["cubin cut", "cubin of another kernel", "record cut", "record without symbol"]
)
def test_damaged_entry_is_compiled_again(tmp_path, damage):
    good = compile_kernel(tiny_source(), cache_dir=tmp_path)
    assert good.path is not None
    record = good.path.with_suffix(".json")
    if damage == "cubin cut":
        good.path.write_bytes(good.data[:100])
    elif damage == "cubin of another kernel":
        good.path.write_bytes(good.data[::-1])
    elif damage == "record cut":
        record.write_text(record.read_text()[:50])
    else:
        record.write_text(
            json.dumps({k: v for k, v in json.loads(record.read_text()).items() if k != "symbol"})
        )
    with pytest.warns(CacheWarning, match="damaged"):
        again = compile_kernel(tiny_source(), cache_dir=tmp_path)
    assert again.origin == "compiled"
    assert again.data == good.data
    assert compile_kernel(tiny_source(), cache_dir=tmp_path).origin == "cache"


def in_memory_with_one_warning(directory: Path, compiled: list[str]) -> None:
    """Two kernels, each asked for twice: one warning in all, each compiled once in this process."""
    with pytest.warns(CacheWarning) as caught:
        cubins = [compile_kernel(tiny_source(value), cache_dir=directory) for value in (1, 2, 1, 2)]
    messages = [str(w.message) for w in caught if issubclass(w.category, CacheWarning)]
    assert len(messages) == 1
    assert str(directory) in messages[0]
    assert CACHE_DIR_VARIABLE in messages[0]
    assert compiled == ["tiny", "tiny"]
    assert all(cubin.path is None and cubin.data for cubin in cubins)
    assert cubins[0].data != cubins[1].data


def test_file_in_place_of_the_directory(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("not a directory")
    in_memory_with_one_warning(tmp_path / "cache", count_compiles(monkeypatch))


def test_full_disk(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    in_memory_with_one_warning(tmp_path, count_compiles(monkeypatch))
    assert {p.suffix for p in tmp_path.iterdir()} <= {".lock"}


def test_file_system_without_locks(tmp_path, monkeypatch):
    def unsupported(self, *args, **kwargs):
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(cache.FileLock, "acquire", unsupported)
    with pytest.warns(CacheWarning, match="no flock"):
        cubin = compile_kernel(tiny_source(), cache_dir=tmp_path)
    assert cubin.path is not None
    assert compile_kernel(tiny_source(), cache_dir=tmp_path).origin == "cache"


READ_ONLY_CHILD = (
    TINY_IN_CHILD
    + """
import os, pathlib, sys, warnings
directory = pathlib.Path(sys.argv[1])
if os.access(directory, os.W_OK):
    print("writable")
    raise SystemExit
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cubin = compile_kernel(SOURCE, cache_dir=directory)
print(cubin.origin, cubin.path is not None, len([w for w in caught if w.category is cache.CacheWarning]))
"""
)


def run_read_only(directory: Path) -> str:
    directory.chmod(0o555)
    try:
        output, _ = run_python(READ_ONLY_CHILD, directory, before_exec=obey_permissions)
    finally:
        directory.chmod(0o755)
    if output.strip() == "writable":
        pytest.skip("this user writes everywhere and the right cannot be dropped")
    return output.strip()


def test_read_only_directory_that_is_empty(tmp_path):
    assert run_read_only(tmp_path) == "compiled False 1"
    assert list(tmp_path.iterdir()) == []


def test_read_only_directory_that_was_filled(tmp_path):
    filled = compile_kernel(tiny_source(1), cache_dir=tmp_path)
    assert filled.origin == "compiled"
    assert run_read_only(tmp_path) == "cache True 0"


def test_entries_can_be_read_by_other_users(tmp_path):
    umask = os.umask(0o022)
    try:
        path = compile_kernel(tiny_source(), cache_dir=tmp_path).path
    finally:
        os.umask(umask)
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_compile_is_not_stored(tmp_path):
    from prime_kernels.jit import CompileError, KernelSource

    broken = KernelSource("broken", 'extern "C" __global__ void broken() { nonsense; }', "broken", "sm_90a")
    with pytest.raises(CompileError, match="nonsense") as caught:
        compile_kernel(broken, cache_dir=tmp_path)
    assert "nonsense" in caught.value.log
    assert "sm_90a" in str(caught.value)
    assert KernelCache(tmp_path).entries() == []


def test_threads_of_one_process_compile_once(tmp_path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    compiled = count_compiles(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ThreadPoolExecutor(4) as pool:
            cubins = list(pool.map(lambda _: compile_kernel(tiny_source(), cache_dir=tmp_path), range(4)))
    assert compiled == ["tiny"]
    assert len({cubin.data for cubin in cubins}) == 1
