#!/usr/bin/env python3
"""Parity run of CI and of GPU runners: `python ci/parity.py [arguments of python -m prime_kernels parity]`.

Works in a checkout that is not installed; writes JSON, a Markdown table and JUnit XML to runs/parity unless
--out says otherwise.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_OUT = ["--out", "runs/parity"]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from prime_kernels.bench.parity import main

    given = sys.argv[1:]
    has_out = any(word == "--out" or word.startswith("--out=") for word in given)
    sys.exit(main(given if has_out else [*given, *DEFAULT_OUT]))
