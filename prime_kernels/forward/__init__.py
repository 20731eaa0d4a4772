"""Forward kernels and how they are launched."""
