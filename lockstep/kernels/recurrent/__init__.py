"""Shared parts of the recurrent mixers (Gated DeltaNet, Mamba-2). This package defines no op.

history: sizes and indices of the circular history buffers. state: the state of a layer, and replay.
convolution: the reference. prompt_rows: rows of the chunked form on a CPU. cpu: batched forms of
these. step, chunk: launchers of the Triton kernels in step_kernel and chunk_kernels.
"""
