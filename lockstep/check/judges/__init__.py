"""Independent judges of outputs: plain runs, a numpy sampler, transformers' logits and distributions."""
