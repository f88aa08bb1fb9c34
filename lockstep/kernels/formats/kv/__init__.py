"""KV formats: how keys and values lie in pages where they are not of the model's dtype.

    attention(packed) == attention(unpacked), bit for bit

A format is a codec for keys and one for values. A codec turns the D numbers of one token and head,
as the model's dtype has them (keys are rotated by then), into codes and, in some, a few numbers
beside them; nothing else enters, so that neither chunks nor batches nor rejected drafts leave a
trace. Unpacking goes back to the model's dtype, elementwise. Attention always reads the cache, the
tokens that a step brings included.

A codec may leave numbers in a rotation (Codec.turn). Then rope_and_cache gives queries rotated as
the layer's keys are, and paged_attention rotates its sums back as the layer's values were.
"""

from lockstep.kernels.formats.kv.access import (
    codecs_of,
    read_pages,
    turn_of,
    turned,
    turned_back,
    unpacked,
    write_slots,
)
from lockstep.kernels.formats.kv.contract import (
    Codec,
    KVCache,
    KVDevice,
    KVFormat,
    KVFragments,
    PackedKV,
)
from lockstep.kernels.formats.kv.hadamard import Turn

__all__ = [
    "Codec",
    "KVCache",
    "KVDevice",
    "KVFormat",
    "KVFragments",
    "PackedKV",
    "Turn",
    "codecs_of",
    "read_pages",
    "turn_of",
    "turned",
    "turned_back",
    "unpacked",
    "write_slots",
]
