"""Storage formats that kernels read: KV caches and weights."""
