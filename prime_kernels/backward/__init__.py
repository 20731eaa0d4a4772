"""Backward kernels and how they are launched."""
