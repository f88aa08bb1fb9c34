"""Independent judges of outputs: plain runs, a numpy sampler, transformers, distributions."""
