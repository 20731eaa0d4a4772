"""docs/test-matrix.md names tests that exist, in the column of the folder they are in."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGE = REPO / "docs" / "test-matrix.md"
COLUMNS = {"cpu": ("cpu", "compile"), "gpu": ("gpu",)}  # and the folders of their tests
NAMED = re.compile(r"`(test_\w+\.py)::(\w+)`")


def rows() -> list[list[str]]:
    """Cells of every row of the page's tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if not line.startswith("| situation")
    ]


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def test_there_is_a_row_for_every_situation() -> None:
    situations = [row[0] for row in rows()]
    assert len(situations) > 50
    assert len(set(situations)) == len(situations)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_names_in_a_row_exist(row: list[str]) -> None:
    assert len(row) == 2 + len(COLUMNS)
    found = 0
    for folders, cell in zip(COLUMNS.values(), row[1:], strict=False):
        names = NAMED.findall(cell)
        assert NAMED.sub("", cell).strip(", ") == "", f"{cell!r} is more than names of tests"
        for file, test in names:
            paths = [path for folder in folders if (path := REPO / "tests" / folder / file).exists()]
            assert paths, f"there is no {file} in {folders}"
            assert any(test in names_in(path) for path in paths), f"{file} of {folders} has no {test}"
        found += len(names)
    assert found > 0, "no test"
