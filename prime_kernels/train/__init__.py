"""The main job: `python -m prime_kernels train` trains a small MoE language model on real text, anywhere."""

from __future__ import annotations

from .job import main

__all__ = ["main"]
