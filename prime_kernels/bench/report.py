"""Reports of a parity run: JSON for machines, a Markdown table for people, JUnit XML for CI."""

from __future__ import annotations

import importlib
import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .judge import CaseVerdict, OutputVerdict

__all__ = ["summary_line", "verdict_line", "write_reports"]

JSON_NAME, MARKDOWN_NAME, JUNIT_NAME = "parity.json", "parity.md", "parity.xml"


def verdict_line(verdict: CaseVerdict) -> str:
    """One line of plain text: the case, its result, and the error of each output."""
    errors = "  ".join(f"{output.output} {output.error:.1e}" for output in verdict.outputs)
    result = "ok  " if verdict.passed else "FAIL"
    return f"{result} {verdict.case.name:<44} {errors or verdict.failures[0].splitlines()[-1]}"


def summary_line(verdicts: Sequence[CaseVerdict]) -> str:
    """The last line of a run."""
    failed = sum(not verdict.passed for verdict in verdicts)
    return f"parity: {len(verdicts) - failed} passed, {failed} failed"


def write_reports(
    directory: Path, environment: Mapping[str, str], verdicts: Sequence[CaseVerdict]
) -> list[Path]:
    """Write parity.json, parity.md and parity.xml into ``directory`` (made if missing). Returns their paths.

    Raises:
        ModuleNotFoundError: without the package tabulate (the extra ``cli`` has it).
    """
    texts = {
        JSON_NAME: _json(environment, verdicts),
        MARKDOWN_NAME: _markdown(environment, verdicts),
        JUNIT_NAME: _junit(environment, verdicts),
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text, "utf-8")
    return [directory / name for name in texts]


def _output_record(output: OutputVerdict) -> dict[str, Any]:
    record = asdict(output)
    # JSON knows no infinity: an error without a finite value is null, and `failures` says why.
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }


def _case_record(verdict: CaseVerdict) -> dict[str, Any]:
    case = verdict.case
    return {
        "name": case.name,
        "precision": case.precision.name,
        "shape": asdict(case.shape),
        "routing": case.routing.name,
        "ranks": case.ranks,
        "tokens_per_rank": case.tokens_per_rank,
        "variant": case.variant.name,
        "passed": verdict.passed,
        "seconds": round(verdict.seconds, 6),
        "outputs": [_output_record(output) for output in verdict.outputs],
        "failures": list(verdict.failures),
    }


def _json(environment: Mapping[str, str], verdicts: Sequence[CaseVerdict]) -> str:
    report = {
        "environment": dict(environment),
        "passed": all(verdict.passed for verdict in verdicts),
        "cases": [_case_record(verdict) for verdict in verdicts],
    }
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


TABLE_OUTPUTS = ("y", "dx", "dtopk", "dw1", "dw2")


def _markdown(environment: Mapping[str, str], verdicts: Sequence[CaseVerdict]) -> str:
    tabulate = importlib.import_module("tabulate").tabulate
    facts = [(name, value) for name, value in environment.items() if value]
    rows = []
    for verdict in verdicts:
        case, errors = verdict.case, {output.output: output for output in verdict.outputs}
        cells = [_cell(errors.get(name)) for name in TABLE_OUTPUTS]
        result = "pass" if verdict.passed else "**FAIL**"
        names = [case.precision.name, case.shape.name, case.routing.name, case.ranks, case.variant.name]
        rows.append([*names, *cells, result])
    headers = ["precision", "shape", "routing", "ranks", "variant", *TABLE_OUTPUTS, "result"]
    sections = [
        "# Parity with the float64 reference",
        tabulate(facts, headers=["", "value"], tablefmt="github", disable_numparse=True),
        "Relative Frobenius error of each output over all ranks; in brackets that of the worst expert (dw1, "
        "dw2), row (y, dx) or slot (dtopk).",
        tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True),
        summary_line(verdicts),
    ]
    broken = [f"- `{v.case.name}`: {failure.splitlines()[-1]}" for v in verdicts for failure in v.failures]
    if broken:
        sections += ["## Failures", "\n".join(broken)]
    return "\n\n".join(sections) + "\n"


def _cell(output: OutputVerdict | None) -> str:
    return "-" if output is None else f"{output.error:.1e} ({output.worst_error:.1e})"


def _junit(environment: Mapping[str, str], verdicts: Sequence[CaseVerdict]) -> str:
    failed = sum(not verdict.passed for verdict in verdicts)
    total = sum(verdict.seconds for verdict in verdicts)
    counts = {"tests": str(len(verdicts)), "failures": str(failed), "errors": "0", "time": f"{total:.6f}"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(
        root, "testsuite", {"name": "parity", **counts, "timestamp": environment["date"]}
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in environment.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": value})
    for verdict in verdicts:
        case = verdict.case
        class_name = f"parity.{case.precision.name}.{case.shape.name}"
        attributes = {"name": case.name, "classname": class_name, "time": f"{verdict.seconds:.6f}"}
        test = ElementTree.SubElement(suite, "testcase", attributes)
        if not verdict.passed:
            message = verdict.failures[0].splitlines()[-1]
            ElementTree.SubElement(test, "failure", {"message": message}).text = "\n".join(verdict.failures)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
