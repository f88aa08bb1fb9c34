"""Device functions (Triton and Gluon) that the kernels of several ops call."""
