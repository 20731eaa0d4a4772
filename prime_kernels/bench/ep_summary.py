"""What follows from the times of ``bench ep``: exposed communication, speed-ups, and the record of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .ep_case import ROWS_OVER_LINKS, EpSize
from .ep_run import ALONE, CAPACITY_FACTOR, DIRECTIONS, OVER_RANKS, EpResult
from .layer_case import FLOP_CONVENTION, LayerSize
from .record import write_json
from .rounds import Spread

TERAFLOPS_PER_MS = 1e-9  # FLOPs / ms to TFLOP/s
RECORD = re.compile(r"ep(\d+)\.json")
EXPOSED = "exposed communication = time over the ranks - time of one rank alone at an equal load, same rounds"


@dataclass(frozen=True)
class Exposed:
    """Milliseconds of one direction of one contender: over the ranks, and one rank alone."""

    over_ranks: float
    alone: float

    @property
    def ms(self) -> float:
        """What the ranks add; below 0 where the difference is smaller than the noise."""
        return self.over_ranks - self.alone

    @property
    def share(self) -> float:
        """:attr:`ms` as a share of the time over the ranks."""
        return self.ms / self.over_ranks


def exposed(result: EpResult, who: str, direction: str) -> Exposed:
    """Of a contender that was measured."""
    places = result.times[who]
    return Exposed(places[OVER_RANKS][direction].median, places[ALONE][direction].median)


def speed_up(result: EpResult, who: str, other: str, direction: str) -> float | None:
    """How many times faster ``who`` is than ``other`` over the ranks; None where one was not measured."""
    if who not in result.times or other not in result.times:
        return None
    return exposed(result, other, direction).over_ranks / exposed(result, who, direction).over_ranks


def tflops(result: EpResult, milliseconds: float, direction: str) -> float:
    """TFLOP/s of one rank, without recomputation."""
    return result.size.flops(direction) / milliseconds * TERAFLOPS_PER_MS


def _result_record(result: EpResult) -> dict[str, Any]:
    size = result.size
    derived = {
        who: {
            direction: {
                "exposed_ms": exposed(result, who, direction).ms,
                "exposed_share": exposed(result, who, direction).share,
                "tflops": tflops(result, exposed(result, who, direction).over_ranks, direction),
            }
            for direction in DIRECTIONS
        }
        for who in result.times
    }
    return {
        **asdict(result),
        "experts": size.experts,
        "sent_bytes": {direction: size.sent_bytes(direction) for direction in ROWS_OVER_LINKS},
        "derived": derived,
    }


def as_record(
    results: Sequence[EpResult], ranks: int, method: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """One run, for :func:`json.dumps`."""
    return {
        **environment,
        "ranks": ranks,
        "method": method,
        "flop_convention": FLOP_CONVENTION,
        "exposed": EXPOSED,
        "pool_capacity_factor": CAPACITY_FACTOR,
        "results": [_result_record(result) for result in results],
    }


def _result(record: Mapping[str, Any]) -> EpResult:
    size = EpSize(LayerSize(**record["size"]["alone"]), record["size"]["ranks"])
    times = {
        who: {
            place: {direction: Spread(**spread) for direction, spread in directions.items()}
            for place, directions in places.items()
        }
        for who, places in record["times"].items()
    }
    return EpResult(size, record["routing"], times, record["differences"], record["failures"])


def write_record(directory: Path, record: Mapping[str, Any]) -> Path:
    """Write ep<R>.json into ``directory`` (made if missing) and return its path."""
    path = directory / f"ep{record['ranks']}.json"
    write_json(path, record)
    return path


def load_records(directory: Path) -> list[tuple[dict[str, Any], list[EpResult]]]:
    """Every ep<R>.json of ``directory``, by R: the whole record and its results."""
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := RECORD.fullmatch(path.name))]
    records = [json.loads(path.read_text("utf-8")) for _, path in sorted(found)]
    return [(record, [_result(result) for result in record["results"]]) for record in records]
