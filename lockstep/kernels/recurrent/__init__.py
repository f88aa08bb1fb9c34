"""What recurrent mixers share: a causal convolution, and rings that hold their recent tokens.

It defines no op. gated_delta_rule uses all of it, in both laws; it is laid out for Mamba-2 as well,
which has the same convolution and keeps its recent tokens in the same way.

rings: how many tokens a ring holds, and where a token is in it. convolution: the reference. _cpu:
both for whole batches on a CPU. _rings_triton, _convolution_triton and _sums_triton: device
functions.
"""
