"""Adapters for the libraries that models come from. Each imports its library: import the one you use."""

from __future__ import annotations
