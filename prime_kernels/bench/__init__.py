"""Measurements of the kernels: parity against the float64 reference (``python -m prime_kernels parity``)."""

from __future__ import annotations
