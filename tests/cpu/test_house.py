"""The rules of the repository that no linter knows: what may be tracked, what every source file must be."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PACKAGE = REPO / "prime_kernels"
LONGEST_FILE = 600
DEVICE_SUFFIXES = {".cu", ".cuh", ".h"}
GENERATED = ("_vendor", "_aot", "dist", "build", ".venv", "__pycache__")

# Written so that no pattern matches its own line.
MACHINE_PATHS = re.compile(r"/(?:work|root)/[a-z.]|/tmp/(?:bash)_jobs|/home/[a-z]|/Users/[a-z]")
PACKAGE_HOSTS = re.compile(
    r"pypi[.](?:org|io)|python(?:hosted)[.]|registry[.](?:npmjs)|deb[.](?:debian)|index[-](?:url)"
)
# The fixtures of the vendoring tests name "Example Corp" and "Other".
COPYRIGHT = re.compile(r"(?i:copyright) +(?:\(c\)|©|\d{4})(?! (?:Example|Other)\b)|SPDX-File(?:Copyright)")
UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b|raise NotImplemented(?:Error)")
SWALLOWED = re.compile(r"except(?: (?:Base)?Exception)?(?: as \w+)?: *(?:#.*)?\n\s*pass\b")


def tracked() -> list[Path]:
    if not (REPO / ".git").exists():
        pytest.skip("what is tracked is known in a git checkout only")
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return [REPO / name for name in names if name and (REPO / name).exists()]


def tracked_texts() -> Iterator[tuple[Path, str]]:
    for path in tracked():
        data = path.read_bytes()
        if b"\0" not in data:
            yield path.relative_to(REPO), data.decode()


def found(pattern: re.Pattern[str], *, without: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    """`file:line: match` for each match in a tracked text file."""
    return [
        f"{path}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}"
        for path, text in tracked_texts()
        if str(path) not in without
        for match in pattern.finditer(text)
    ]


def sources() -> list[Path]:
    """Every Python file of the package that is written here."""
    return sorted(p for p in PACKAGE.rglob("*.py") if not set(GENERATED) & set(p.relative_to(PACKAGE).parts))


def test_there_is_something_to_check() -> None:
    assert len(sources()) > 20
    assert len(tracked()) > 50


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (MACHINE_PATHS, "a/work/1", "cd /wo" + "rk/main"),
        (PACKAGE_HOSTS, "index page", "https://py" + "pi.org/simple"),
        (COPYRIGHT, "no copyright line", "Copyright " + "(c) 2024 Someone"),
        (UNFINISHED, "a stodgy todo list", "# TO" + "DO later"),
        (SWALLOWED, "except OSError:\n    raise", "except Exception:" + "\n    pass"),
    ],
)
def test_patterns_find_what_they_are_for(pattern: re.Pattern[str], good: str, bad: str) -> None:
    assert pattern.search(bad)
    assert not pattern.search(" " + good)


def test_no_path_of_a_machine() -> None:
    assert found(MACHINE_PATHS) == []


def test_no_host_of_a_package_registry() -> None:
    assert found(PACKAGE_HOSTS) == []


def test_no_copyright_line_of_others() -> None:
    assert found(COPYRIGHT, without={"LICENSE"}) == []


def test_nothing_unfinished() -> None:
    assert [place for place in found(UNFINISHED) if not place.startswith("tests/cpu/test_jit_cache.py")] == []


def test_no_swallowed_error() -> None:
    assert found(SWALLOWED) == []


def test_nothing_generated_is_tracked() -> None:
    assert [p for p in tracked() if set(GENERATED) & set(p.relative_to(REPO).parts)] == []


def test_files_are_short_enough_to_hold_in_the_head() -> None:
    lengths = {
        str(path): text.count("\n")
        for path, text in tracked_texts()
        if path.suffix == ".py" or path.suffix in DEVICE_SUFFIXES
    }
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE} == {}


def imported_absolutely(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        yield from (name for name in names if name.partition(".")[0] == PACKAGE.name)


def test_imports_inside_the_package_are_relative() -> None:
    """The package must work under another top-level name."""
    wrong = {
        str(path.relative_to(REPO)): names
        for path in sources()
        if (names := list(imported_absolutely(ast.parse(path.read_text()))))
    }
    assert wrong == {}


def undocumented(tree: ast.Module) -> Iterator[str]:
    """The module, and its public functions, classes and methods, where they have no docstring."""
    if ast.get_docstring(tree) is None:
        yield "the module"
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in tree.body:
        if not isinstance(node, (*functions, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield node.name
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if (
                    isinstance(method, functions)
                    and is_own_method(method)
                    and ast.get_docstring(method) is None
                ):
                    yield f"{node.name}.{method.name}"


# Methods that torch or Python define, and say there what they mean.
INHERITED = {"forward", "backward", "extra_repr", "find_spec", "create_module", "exec_module"}


def is_own_method(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    setter = any(getattr(decorator, "attr", "") == "setter" for decorator in method.decorator_list)
    return not (setter or method.name.startswith("_") or method.name in INHERITED | protocol_methods())


@functools.cache
def protocol_methods() -> frozenset[str]:
    """Methods of the package's Protocol classes: documented there, not again in each implementation."""
    return frozenset(
        method.name
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and "Protocol" in [getattr(base, "id", "") for base in node.bases]
        for method in node.body
        if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
    )


def test_everything_public_has_a_docstring() -> None:
    wrong = {
        str(path.relative_to(REPO)): names
        for path in sources()
        if (names := list(undocumented(ast.parse(path.read_text()))))
    }
    assert wrong == {}


def test_undocumented_code_is_found() -> None:
    functions = '"""m"""\ndef a(): ...\ndef _b(): ...\n'
    code = functions + 'class C:\n    """c"""\n    def d(self): ...\n    def _e(self): ...'
    assert list(undocumented(ast.parse(code))) == ["a", "C.d"]
