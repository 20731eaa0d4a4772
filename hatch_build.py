"""Build hook: every wheel and editable install gets the vendored headers before files are collected."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def load_vendor_script(root: Path) -> ModuleType:
    """`scripts/` is not a package, so the script is loaded by its path."""
    spec = importlib.util.spec_from_file_location("vendor_deepgemm", root / "scripts" / "vendor_deepgemm.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("scripts/vendor_deepgemm.py is missing from this source tree")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class CustomBuildHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Vendor for wheels (`standard` and `editable`); a source distribution carries the script instead."""
        if self.target_name == "wheel":
            root = Path(self.root)
            load_vendor_script(root).vendor(root / "prime_kernels" / "_vendor", root / "patches")
