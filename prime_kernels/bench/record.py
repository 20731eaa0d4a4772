"""What a recorded measurement belongs to: when, on what, with what."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from .._version import __version__


def describe_run(command: str, device: torch.device, commit: str = "") -> dict[str, str]:
    """Date, hardware, command, commit and versions of a run.

    Args:
        command: what followed ``python -m``.
        device: the device it ran on.
        commit: recorded as given; empty asks git, which gives "" outside a checkout. A "+" marks one with
            changes that are not committed.
    """
    package = (__package__ or "").partition(".")[0]
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": _hardware(device),
        "command": f"python -m {command}".strip(),
        "commit": commit or _git_commit(),
        "package": f"{package} {__version__}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
    }


def _hardware(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type.upper()} ({platform.machine()})"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.multi_processor_count} SMs, driver {_driver_version()}"


def _git_commit() -> str:
    checkout = Path(__file__).resolve().parents[2]
    # An installed package may lie inside some other checkout, whose commit says nothing about it.
    if not (checkout / ".git").exists():
        return ""
    head, changes = (_git(checkout, "rev-parse", "HEAD"), _git(checkout, "status", "--porcelain", "-uno"))
    return f"{head}+" if head and changes else head


def _git(checkout: Path, *arguments: str) -> str:
    return _output("git", "-C", str(checkout), *arguments)


def _driver_version() -> str:
    """The driver's release as nvidia-smi names it, or "unknown" where nvidia-smi is missing or fails."""
    said = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return said.partition("\n")[0] or "unknown"


def _output(*command: str) -> str:
    """What a program prints; "" where there is none of that name, or it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a measurement, with its folder where that is missing.

    Raises:
        ValueError: a value is infinite or NaN.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", "utf-8")
