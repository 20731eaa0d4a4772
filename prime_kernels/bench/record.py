"""What a recorded measurement belongs to: when, on what, with what."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

from .._version import __version__


def describe_run(command: str, device: torch.device, commit: str = "") -> dict[str, str]:
    """Date, hardware, command, commit and versions of a run on a CUDA device.

    Args:
        command: what followed ``python -m``.
        device: the CUDA device measured.
        commit: recorded as given; empty asks git, which gives "" outside a checkout.
    """
    package = (__package__ or "").partition(".")[0]
    properties = torch.cuda.get_device_properties(device)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": f"{properties.name}, {properties.multi_processor_count} SMs, driver {_driver_version()}",
        "command": f"python -m {command}".strip(),
        "commit": commit or _git_commit(),
        "package": f"{package} {__version__}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
    }


def _git_commit() -> str:
    result = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() if result.returncode == 0 else ""


def _driver_version() -> str:
    """The driver's release as nvidia-smi names it, or "unknown" where nvidia-smi is missing."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return result.stdout.split("\n")[0].strip() or "unknown"
