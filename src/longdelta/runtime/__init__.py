"""How compiled kernels are launched."""
