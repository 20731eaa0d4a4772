"""What the optional extras of the package install, for messages that must work as typed.

The extras of pyproject.toml hold the same requirements; a test compares them.
"""

from __future__ import annotations

import re

#: Extra -> its requirements.
EXTRAS: dict[str, tuple[str, ...]] = {
    "cli": ("tqdm>=4.65", "matplotlib>=3.7", "tabulate>=0.9"),
    "integrations": ("pydantic>=2.7",),
}


def names(extra: str) -> tuple[str, ...]:
    """The distributions of an extra, without their versions. Their modules have the same names."""
    return tuple(re.split("[<>=]", requirement)[0] for requirement in EXTRAS[extra])


def pip_line(extra: str) -> str:
    """The command that installs an extra. It names the packages, as this one may have come from no index."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in EXTRAS[extra])
