"""KV formats: storage of keys and values in pages in another type than the model's.

    attention(quantized cache) == attention(dequantized cache), bit for bit

A format is a quantizer for keys and one for values. A quantizer turns the D numbers of one token
and head, in the model's dtype (keys after the rotary embedding), into quantized values (`qdata`)
and, in some formats, a few scales. Nothing else enters, so the bits of a stored token do not depend
on chunks, batches or rejected drafts. Dequantization is elementwise and returns to the model's
dtype. Attention always reads the cache, the tokens that a step brings included.

A quantizer may store values in a Hadamard rotation (KVQuantizer.rotation). Then rope_and_cache
returns queries in the rotation of the layer's keys, and paged_attention rotates its output back out
of the rotation of the layer's values.
"""

from lockstep.kernels.formats.kv.access import (
    dequantize,
    is_dense,
    quantizers_of,
    read_pages,
    rotate_back,
    rotate_queries,
    rotation_of,
    write_slots,
)
from lockstep.kernels.formats.kv.contract import (
    KVCache,
    KVDeviceFunctions,
    KVFormat,
    KVMmaFunctions,
    KVQuantizer,
    QuantizedKV,
)
from lockstep.kernels.formats.kv.hadamard import HadamardRotation

__all__ = [
    "HadamardRotation",
    "KVCache",
    "KVDeviceFunctions",
    "KVFormat",
    "KVMmaFunctions",
    "KVQuantizer",
    "QuantizedKV",
    "dequantize",
    "is_dense",
    "quantizers_of",
    "read_pages",
    "rotate_back",
    "rotate_queries",
    "rotation_of",
    "write_slots",
]
