# mypy: disable-error-code="no-untyped-def,no-untyped-call,annotation-unchecked"
"""Device functions of the TurboQuant formats, in Triton.

Sums add in the reference's order, by splits and joins. Square roots and divisions are correctly
rounded. Launches forbid contracting multiplications with additions (enable_fp_fusion=False).

fp32: a tree of selections, whose leaves are the centroids, decodes a code. bf16: inline assembly.
The instruction prmt takes eight 3-bit selectors, four bits apart, and looks up the lower or upper
bytes of four centroids at once; signs are put on the upper bytes, and another prmt pairs lower and
upper bytes. Both round the product with the scale once.
"""

import torch
import triton
import triton.language as tl

from lockstep.kernels.device.dequantize import split_16bit
from lockstep.kernels.device.hadamard import flip_signs, hadamard_blocks, sign_bits
from lockstep.kernels.formats.kv import KVDeviceFunctions, hadamard, turboquant
from lockstep.kernels.formats.kv.turboquant import CENTROIDS

MIN_EXPONENT = tl.constexpr(turboquant.MIN_EXPONENT)
MAX_EXPONENT = tl.constexpr(turboquant.MAX_EXPONENT)
CENTROIDS_3 = tl.constexpr(CENTROIDS[3])
CENTROIDS_4 = tl.constexpr(CENTROIDS[4])
K_BLOCK = tl.constexpr(hadamard.K_BLOCK)
V_BLOCK = tl.constexpr(hadamard.V_BLOCK)


def centroid_bytes(centroids, upper):
    """Return one byte of each of up to four centroids in bf16, the first one lowest.

    upper: 1 for the upper bytes, 0 for the lower ones.
    """
    bits = torch.tensor(centroids, dtype=torch.bfloat16).view(torch.int16).tolist()
    return sum((x >> 8 * upper & 0xFF) << 8 * i for i, x in enumerate(bits))


def _word_ptx(word, out, scale, signs=None):
    """Return PTX that decodes the eight codes of a word into four bf16 pairs, $out and the next
    three.

    signs: register of the signs where they are not part of the selectors.
    """
    lines = [f"shr.u32 n, {word}, 16;"]
    for half, selectors in enumerate((word, "n")):
        lines += [f"prmt.b32 lo, l0, l1, {selectors};", f"prmt.b32 hi, h0, h1, {selectors};"]
        if signs:
            lines.append(f"shl.b32 s, {signs}, {4 * half};")
            # hi ^= signs & 0x80 of each byte (truth table a & b ^ c = 0x6a).
            lines.append("lop3.b32 hi, s, 0x80808080, hi, 0x6a;")
        for pair, order in enumerate(("0x5140", "0x7362")):
            lines.append(f"prmt.b32 t, lo, hi, {order};")
            lines.append(f"fma.rn.bf16x2 ${out + 2 * half + pair}, t, {scale}, none;")
    return lines


def _ptx_block(centroids, lines):
    """Return a PTX block with the centroids' bytes in registers: lower ones in l0 and l1, upper
    ones in h0 and h1."""
    table = [
        f"mov.b32 {name}, {centroid_bytes(centroids[first : first + 4], upper):#010x};"
        for name, first, upper in (("l0", 0, 0), ("l1", 4, 0), ("h0", 0, 1), ("h1", 4, 1))
    ]
    registers = ".reg .b32 l0, l1, h0, h1, none, n, lo, hi, s, t, u;"
    # none = -0 twice: the fma's addend keeps the sign of zeros.
    body = [registers, *table, "mov.b32 none, 0x80008000;", *lines]
    return tl.constexpr("\n".join(("{", *body, "}")))


WORD_4_PTX = _ptx_block(
    CENTROIDS[4], ["and.b32 u, $4, 0x77777777;", *_word_ptx("u", 0, "$5", signs="$4")]
)  # fmt: skip
"""PTX: a word of 4-bit codes ($4) and a scale, twice in a word ($5) -> four bf16 pairs."""
SIGNED_CENTROIDS = (*CENTROIDS[3], *(-centroid for centroid in CENTROIDS[3]))
WORD_3_PTX = _ptx_block(SIGNED_CENTROIDS, ["and.b32 u, $4, 0x77777777;", *_word_ptx("u", 0, "$5")])
"""PTX: the same for a word of 3-bit codes with their signs. The fourth bit of each is masked."""


@triton.jit
def _centroid(index, BITS: tl.constexpr):
    """Return the centroid of an index, int32. Bits above the index are ignored."""
    bit_0 = (index & 1) != 0
    bit_1 = (index & 2) != 0
    if BITS == 3:
        return tl.where(
            bit_1,
            tl.where(bit_0, CENTROIDS_3[3], CENTROIDS_3[2]),
            tl.where(bit_0, CENTROIDS_3[1], CENTROIDS_3[0]),
        )
    else:
        low = tl.where(
            bit_1,
            tl.where(bit_0, CENTROIDS_4[3], CENTROIDS_4[2]),
            tl.where(bit_0, CENTROIDS_4[1], CENTROIDS_4[0]),
        )
        high = tl.where(
            bit_1,
            tl.where(bit_0, CENTROIDS_4[7], CENTROIDS_4[6]),
            tl.where(bit_0, CENTROIDS_4[5], CENTROIDS_4[4]),
        )
        return tl.where((index & 4) != 0, high, low)


@triton.jit
def _nearest_index(magnitude, norm, BITS: tl.constexpr):
    """Return the number of thresholds times norm that are below a magnitude, int32."""
    if BITS == 3:
        count = (magnitude > norm * ((CENTROIDS_3[0] + CENTROIDS_3[1]) / 2)).to(tl.int32)
        count += (magnitude > norm * ((CENTROIDS_3[1] + CENTROIDS_3[2]) / 2)).to(tl.int32)
        return count + (magnitude > norm * ((CENTROIDS_3[2] + CENTROIDS_3[3]) / 2)).to(tl.int32)
    else:
        count = (magnitude > norm * ((CENTROIDS_4[0] + CENTROIDS_4[1]) / 2)).to(tl.int32)
        # Thresholds ascend: the count of those below is the index of the nearest centroid.
        for i in tl.static_range(1, 7):
            count += (magnitude > norm * ((CENTROIDS_4[i] + CENTROIDS_4[i + 1]) / 2)).to(tl.int32)
        return count


@triton.jit
def _pair_sums(x, STEP: tl.constexpr):
    """Return the sum of x [rows, N] fp32, N a power of two, as [rows, 1]: a binary tree of
    neighbours. STEP is 1.

    Both elements of a pair keep the sum, so that all elements of a row are the total in the end,
    and a maximum returns it in the row's layout. Sums over ever fewer elements would end in a
    layout of their own, which the compiler gives to everything that is compared with them: a whole
    row per thread.
    """
    if STEP == x.shape[1]:
        # All elements are equal here, so the maximum is exact in any order.
        return tl.max(x, 1)[:, None]
    else:
        pairs = tl.reshape(x, (x.shape[0], x.shape[1] // (2 * STEP), 2, STEP))
        total = tl.broadcast_to(tl.sum(pairs, 2)[:, :, None, :], pairs.shape)
        return _pair_sums(tl.reshape(total, x.shape), 2 * STEP)


@triton.jit
def _power_of_two(exponent):
    """Return 2^(e - 127) of biased exponents."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_words(index, sign, qdata, live, HEADS: tl.constexpr, D: tl.constexpr,
                 BITS: tl.constexpr):  # fmt: skip
    """Pack indices and signs [.., N] int32 of heads as bit_packing.py does, and store them."""
    LANES: tl.constexpr = max(D // 32, 1)
    SLOTS: tl.constexpr = D // (8 * LANES)
    index = tl.reshape(index, (HEADS, SLOTS, LANES, 8))
    sign = tl.reshape(sign, (HEADS, SLOTS, LANES, 8))
    j = tl.arange(0, 8)[None, None, None, :]
    # Octet slot * LANES + lane of the head is octet `slot` of the lane.
    slot = tl.arange(0, SLOTS)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    if BITS == 4:
        words = tl.sum((index << 4 * j) | (sign << (8 * (j % 4) + 7 - 4 * (j // 4))), 3)
        tl.store(qdata[:, :, None] + lane * SLOTS + slot, words, mask=live[:, :, None])
    else:
        code = index | (sign << 2)
        words = tl.sum(code << 4 * j, 3)
        for plane in tl.static_range(min(SLOTS, 3)):
            # Bit `plane` of the fourth octet's codes fills the spare bits of this plane's words.
            fourth = tl.sum(((code >> plane) & 1) << (4 * j + 3), 3)
            part = tl.where(slot == plane, words, tl.where(slot == 3, fourth, 0))
            first = qdata + plane * LANES + tl.arange(0, LANES)[None]
            tl.store(first, tl.sum(part, 1), mask=live)


@triton.jit
def _store(heads, qdata, scales, seed, live, D: tl.constexpr, BITS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Quantize heads [HEADS, D] in blocks of BLOCK elements, or of all where D is less.

    See KVDeviceFunctions.store.
    """
    HEADS: tl.constexpr = heads.shape[0]
    N: tl.constexpr = min(D, BLOCK)
    NUM_BLOCKS: tl.constexpr = D // N
    x = tl.reshape(heads, (HEADS * NUM_BLOCKS, N))
    # Biased exponent of the largest magnitude; integer order puts inf and NaN on top.
    exponent = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)[:, None] >> 23
    overflow = exponent > MAX_EXPONENT
    usable = (exponent >= MIN_EXPONENT) & (exponent <= MAX_EXPONENT)
    exponent = tl.where(usable, exponent, 127)
    # 254 + 1 - e: scaled to a largest number in [2, 4), so no square is subnormal or overflows.
    scaled = tl.where(usable, x, 0.0) * _power_of_two(255 - exponent)
    norm = tl.sqrt_rn(_pair_sums(scaled * scaled, 1))
    d = tl.broadcast_to(tl.arange(0, D)[None], (HEADS, D))
    flip_mask = tl.reshape(sign_bits(seed, d), (HEADS * NUM_BLOCKS, N))
    # Rotated without the division by sqrt(N), which cancels in the scale.
    rotated = hadamard_blocks(flip_signs(scaled, flip_mask), N)
    index = _nearest_index(tl.abs(rotated), norm, BITS)
    centroid = _centroid(index, BITS)
    scale = tl.div_rn(norm, tl.sqrt_rn(_pair_sums(centroid * centroid, 1))) * _power_of_two(
        exponent - 1
    )
    scale = tl.where(usable, scale, 0.0).to(tl.int32, bitcast=True)
    # Rounds to bf16, to the nearest, ties to even, by integers: the interpreter's cast truncates.
    scale = (scale + 0x7FFF + ((scale >> 16) & 1)) >> 16
    scale = tl.reshape(tl.where(overflow, 0x7FC0, scale), (HEADS, NUM_BLOCKS))
    scale = scale.to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(scales + tl.arange(0, NUM_BLOCKS)[None], scale, mask=live)
    _store_words(index, (rotated < 0).to(tl.int32), qdata, live, HEADS, D, BITS)


@triton.jit
def _decode(word, j: tl.constexpr, scale, BITS: tl.constexpr):
    """Decode code j of a word to fp32."""
    value = _centroid(word >> 4 * j, BITS) * scale
    if BITS == 4:
        negative = (word >> (8 * (j % 4) + 7 - 4 * (j // 4))) & 1
    else:
        negative = (word >> (4 * j + 2)) & 1
    # Bit 31 of the mask flips the sign.
    return flip_signs(value, negative << 31)


@triton.jit
def _join8(v0, v1, v2, v3, v4, v5, v6, v7):
    """Join the eight numbers of a word in their order: [..., 2, 2, 2]."""
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.join(even, odd)


@triton.jit
def _decode_word(word, scale, BITS: tl.constexpr):
    """Decode the eight codes of words [T, W]: [T, W, 2, 2, 2] fp32."""
    return _join8(
        _decode(word, 0, scale, BITS), _decode(word, 1, scale, BITS), _decode(word, 2, scale, BITS),
        _decode(word, 3, scale, BITS), _decode(word, 4, scale, BITS), _decode(word, 5, scale, BITS),
        _decode(word, 6, scale, BITS), _decode(word, 7, scale, BITS),
    )  # fmt: skip


@triton.jit
def _load_scales(scales, live, D: tl.constexpr, BLOCK: tl.constexpr):
    """Load the bf16 scales of a head as 32-bit words: asynchronous copies take 4 bytes or more.

    A head of one block may begin in the middle of a word; the second result is then the bit where
    it begins. A page contains whole words.
    """
    if D > BLOCK:
        words = scales.to(tl.pointer_type(tl.int32), bitcast=True)
        first = tl.load(words, mask=live, other=0)
        if D > 2 * BLOCK:
            return first, tl.load(words + 1, mask=live, other=0)
        else:
            return first, first
    else:
        # Round the address down to a word; bit 1 selects the half.
        address = scales.to(tl.int64)
        word = (address & -4).to(tl.pointer_type(tl.int32))
        return tl.load(word, mask=live, other=0), (address & 2).to(tl.int32) * 8


@triton.jit
def _octet_scale(words, octet, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return the scale of a lane's octet, 0 .. 3, twice in a word. words: of _load_scales."""
    if D > BLOCK:
        block = octet // (4 * BLOCK // D)
        if D > 2 * BLOCK:
            word = tl.where(block < 2, words[0], words[1])
        else:
            word = words[0]
        scale = (word >> (block % 2 * 16)) & 0xFFFF
    else:
        scale = (words[0] >> words[1]) & 0xFFFF
    return scale | (scale << 16)


@triton.jit
def _interleave(a, b, c, d, D: tl.constexpr):
    """Interleave four words of each lane [T, D / 32] into [T, D / 8]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], D // 8))


@triton.jit
def _load(qdata, scales, columns, live, D: tl.constexpr, BITS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Load words, then the scales of _load_scales. See KVDeviceFunctions.load."""
    loaded = ()
    for plane in tl.static_range(1 if BITS == 4 else min(3, D // 8)):
        word_ptrs = qdata + plane * max(D // 32, 1) + columns
        loaded = loaded + (tl.load(word_ptrs, mask=live, other=0),)  # type: ignore[assignment]
    return loaded + _load_scales(scales, live, D, BLOCK)


@triton.jit
def _words_and_scales(loaded, columns, D: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return words of eight codes [T, D / 8] in the stored order of octets, and the scale of each,
    twice in a word."""
    if BITS == 4:
        return loaded[0], _octet_scale(loaded[1:], columns % 4, D, BLOCK)
    elif D < 32:
        words = tl.reshape(tl.join(loaded[0], loaded[1]), (loaded[0].shape[0], 2))
        return words, _octet_scale(loaded[2:], 0, D, BLOCK)
    else:
        a = loaded[0]
        b = loaded[1]
        c = loaded[2]
        # The fourth word is spread over bit 3 of each code of the other three.
        d = ((a >> 3) & 0x11111111) | ((b >> 2) & 0x22222222) | ((c >> 1) & 0x44444444)
        # A zero of the words' shape broadcasts the scale to one per lane.
        none = a & 0
        scale = _interleave(
            _octet_scale(loaded[3:], 0, D, BLOCK) | none,
            _octet_scale(loaded[3:], 1, D, BLOCK) | none,
            _octet_scale(loaded[3:], 2, D, BLOCK) | none,
            _octet_scale(loaded[3:], 3, D, BLOCK) | none, D,
        )  # fmt: skip
        return _interleave(a, b, c, d, D), scale


@triton.jit
def _transpose_octets(values, D: tl.constexpr):
    """Reorder numbers of _words_and_scales [T, D / 8, 2, 2, 2] to [T, D] by column."""
    if D < 32:
        return tl.reshape(values, (values.shape[0], D))
    else:
        octets = tl.reshape(values, (values.shape[0], D // 32, 4, 8))
        return tl.reshape(tl.permute(octets, (0, 2, 1, 3)), (values.shape[0], D))


@triton.jit
def _dequantize(loaded, columns, D: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Dequantize to fp32. See KVDeviceFunctions.dequantize."""
    words, scale = _words_and_scales(loaded, columns, D, BITS, BLOCK)
    scale = (scale << 16).to(tl.float32, bitcast=True)
    return _transpose_octets(_decode_word(words, scale, BITS), D)


@triton.jit
def _join_pairs(p0, p1, p2, p3):
    """Join the bf16 pairs of a word's eight values: [T, W, 2, 2, 2]."""
    l0, h0 = split_16bit(p0, tl.bfloat16)
    l1, h1 = split_16bit(p1, tl.bfloat16)
    l2, h2 = split_16bit(p2, tl.bfloat16)
    l3, h3 = split_16bit(p3, tl.bfloat16)
    return _join8(l0, h0, l1, h1, l2, h2, l3, h3)


@triton.jit
def _dequantize_bf16(loaded, columns, D: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Dequantize to bf16 by assembly, two values per instruction."""
    PTX: tl.constexpr = WORD_4_PTX if BITS == 4 else WORD_3_PTX
    words, scale = _words_and_scales(loaded, columns, D, BITS, BLOCK)
    p0, p1, p2, p3 = tl.inline_asm_elementwise(
        PTX, "=&r,=&r,=&r,=&r,r,r", [words, scale],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return _transpose_octets(_join_pairs(p0, p1, p2, p3), D)


@triton.jit
def store_keys_3(heads, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Quantize keys to 3 bits and store them. See KVDeviceFunctions."""
    _store(heads, qdata, scales, layer_constant, live, D, 3, K_BLOCK)


@triton.jit
def store_keys_4(heads, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Quantize keys to 4 bits and store them. See KVDeviceFunctions."""
    _store(heads, qdata, scales, layer_constant, live, D, 4, K_BLOCK)


@triton.jit
def store_values_3(heads, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Quantize values to 3 bits and store them. See KVDeviceFunctions."""
    _store(heads, qdata, scales, layer_constant, live, D, 3, V_BLOCK)


@triton.jit
def store_values_4(heads, qdata, scales, layer_constant, live, columns, D: tl.constexpr):
    """Quantize values to 4 bits and store them. See KVDeviceFunctions."""
    _store(heads, qdata, scales, layer_constant, live, D, 4, V_BLOCK)


@triton.jit
def load_keys_3(qdata, scales, columns, live, D: tl.constexpr):
    """Load 3-bit keys. See KVDeviceFunctions."""
    return _load(qdata, scales, columns, live, D, 3, K_BLOCK)


@triton.jit
def dequantize_keys_3(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize 3-bit keys to fp32. See KVDeviceFunctions."""
    return _dequantize(loaded, columns, D, 3, K_BLOCK)


@triton.jit
def dequantize_keys_3_bf16(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize 3-bit keys to bf16. See KVDeviceFunctions."""
    return _dequantize_bf16(loaded, columns, D, 3, K_BLOCK)


@triton.jit
def load_keys_4(qdata, scales, columns, live, D: tl.constexpr):
    """Load 4-bit keys. See KVDeviceFunctions."""
    return _load(qdata, scales, columns, live, D, 4, K_BLOCK)


@triton.jit
def dequantize_keys_4(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize 4-bit keys to fp32. See KVDeviceFunctions."""
    return _dequantize(loaded, columns, D, 4, K_BLOCK)


@triton.jit
def dequantize_keys_4_bf16(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize 4-bit keys to bf16. See KVDeviceFunctions."""
    return _dequantize_bf16(loaded, columns, D, 4, K_BLOCK)


@triton.jit
def load_values_3(qdata, scales, columns, live, D: tl.constexpr):
    """Load 3-bit values. See KVDeviceFunctions."""
    return _load(qdata, scales, columns, live, D, 3, V_BLOCK)


@triton.jit
def dequantize_values_3(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize 3-bit values to fp32. See KVDeviceFunctions."""
    return _dequantize(loaded, columns, D, 3, V_BLOCK)


@triton.jit
def dequantize_values_3_bf16(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize 3-bit values to bf16. See KVDeviceFunctions."""
    return _dequantize_bf16(loaded, columns, D, 3, V_BLOCK)


@triton.jit
def load_values_4(qdata, scales, columns, live, D: tl.constexpr):
    """Load 4-bit values. See KVDeviceFunctions."""
    return _load(qdata, scales, columns, live, D, 4, V_BLOCK)


@triton.jit
def dequantize_values_4(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize 4-bit values to fp32. See KVDeviceFunctions."""
    return _dequantize(loaded, columns, D, 4, V_BLOCK)


@triton.jit
def dequantize_values_4_bf16(loaded, columns, layer_constant, D: tl.constexpr):
    """Dequantize 4-bit values to bf16. See KVDeviceFunctions."""
    return _dequantize_bf16(loaded, columns, D, 4, V_BLOCK)


KEYS_3 = KVDeviceFunctions(store_keys_3, 32, load_keys_3, dequantize_keys_3, dequantize_keys_3_bf16)
KEYS_4 = KVDeviceFunctions(store_keys_4, 8, load_keys_4, dequantize_keys_4, dequantize_keys_4_bf16)
VALUES_3 = KVDeviceFunctions(
    store_values_3, 32, load_values_3, dequantize_values_3, dequantize_values_3_bf16
)
VALUES_4 = KVDeviceFunctions(
    store_values_4, 8, load_values_4, dequantize_values_4, dequantize_values_4_bf16
)
