"""Storage formats that kernels read: quantized weights and quantized KV caches."""
