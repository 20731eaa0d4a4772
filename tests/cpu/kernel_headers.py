"""Constants of the SM90 kernels, and how many arrivals their barriers count, read from the headers."""

from __future__ import annotations

import re
from pathlib import Path

INCLUDE = Path(__file__).resolve().parents[2] / "prime_kernels" / "include" / "prime_kernels"
# Each uses constants of those before it.
HEADERS = ("order.h", "tiles.cuh", "tasks.cuh", "output.cuh", "forward_sm90_bf16.cuh")
_CONSTANT = re.compile(r"^constexpr uint32_t (k\w+) = ([^;]+);", re.MULTILINE)
_ARRIVALS = re.compile(r"\b((?:\w+_)?(?:full|empty))(?:\(\w+\)|(?:\[\w+\])+)\.init\(([^;]+)\);")
_GRAD_COLUMNS = re.compile(r"uint32_t kGradColumns = kKeptZ \? (\d+) : (\d+);")
_LEAST_HIDDEN = re.compile(r"\bhidden >= ([^;]+?) and ")


def _value(expression: str, known: dict[str, int]) -> int:
    """Of an integer expression of the headers."""
    expression = expression.replace("sizeof(Bf16)", "2").replace("~0u", "~0").replace("/", "//")
    return int(eval(expression, {"__builtins__": {}}, known))


def _read_constants() -> dict[str, int]:
    known: dict[str, int] = {}
    for header in HEADERS:
        for name, expression in _CONSTANT.findall((INCLUDE / header).read_text()):
            known[name] = _value(expression, known)
    return known


def _read_arrivals() -> dict[str, int]:
    """By name of a barrier: arrivals that complete a phase of it."""
    text = "".join((INCLUDE / header).read_text() for header in HEADERS)
    return {name: _value(count, CONSTANTS) for name, count in _ARRIVALS.findall(text)}


def _only(pattern: re.Pattern[str], header: str) -> tuple[str, ...]:
    found = list(pattern.finditer((INCLUDE / header).read_text()))
    assert len(found) == 1, f"{pattern.pattern!r} is {len(found)} times in {header}"
    return found[0].groups()


CONSTANTS = _read_constants()
COUNTS = _read_arrivals()
# Columns of a kGrad tile with kept and with recomputed z, and the least H that `takes_shape` lets through.
GRAD_COLUMNS = tuple(int(columns) for columns in _only(_GRAD_COLUMNS, "backward_sm90_bf16.cuh"))
LEAST_HIDDEN = _value(_only(_LEAST_HIDDEN, "tiles.cuh")[0], CONSTANTS)
