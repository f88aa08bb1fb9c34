# mypy: ignore-errors
"""turboquant.py in Triton.

What is added is added in the reference's order, by splits and joins; square root and division are
the correctly rounded ones. The launch forbids to contract multiplications with additions.

A code is unpacked by a tree of selections, whose leaves are the points. In bf16 by assembly: eight
selectors of three bits, four bits apart, are what prmt takes; it looks up the lower and the upper
bytes of four points at once, on which signs are put, and a second one pairs them. The product with
the number beside the codes is rounded once in both.
"""

import torch
import triton
import triton.language as tl

from lockstep.kernels.device.dequantize import split_16bit
from lockstep.kernels.device.hadamard import flipped, flips, mixed
from lockstep.kernels.formats.kv import KVDevice
from lockstep.kernels.formats.kv.hadamard import OF_VALUES as IN_VALUES
from lockstep.kernels.formats.kv.hadamard import WHOLE_HEAD as LARGEST
from lockstep.kernels.formats.kv.turboquant import LEAST as LEAST_EXPONENT
from lockstep.kernels.formats.kv.turboquant import MOST as MOST_EXPONENT
from lockstep.kernels.formats.kv.turboquant import POINTS

LEAST = tl.constexpr(LEAST_EXPONENT)
MOST = tl.constexpr(MOST_EXPONENT)
P3 = tl.constexpr(POINTS[3])
P4 = tl.constexpr(POINTS[4])
WHOLE_HEAD = tl.constexpr(LARGEST)
OF_VALUES = tl.constexpr(IN_VALUES)


def _bytes_of(points, upper):
    """One byte of each of up to four points in bf16, the first lowest."""
    bits = torch.tensor(points, dtype=torch.bfloat16).view(torch.int16).tolist()
    return sum((x >> 8 * upper & 0xFF) << 8 * i for i, x in enumerate(bits))


def _eight_text(word, out, number, signs=None):
    """PTX: the eight codes of a word -> four pairs, $out and the next three. signs: where they are
    apart from the selectors."""
    lines = [f"shr.u32 n, {word}, 16;"]
    for half, selectors in enumerate((word, "n")):
        lines += [f"prmt.b32 lo, l0, l1, {selectors};", f"prmt.b32 hi, h0, h1, {selectors};"]
        if signs:
            lines.append(f"shl.b32 s, {signs}, {4 * half};")
            lines.append("lop3.b32 hi, s, 0x80808080, hi, 0x6a;")
        for pair, order in enumerate(("0x5140", "0x7362")):
            lines.append(f"prmt.b32 t, lo, hi, {order};")
            lines.append(f"fma.rn.bf16x2 ${out + 2 * half + pair}, t, {number}, none;")
    return lines


def _text(points, lines):
    """PTX with the points' bytes in registers: lower ones in l0 and l1, upper ones in h0 and h1."""
    table = [
        f"mov.b32 {name}, {_bytes_of(points[first : first + 4], upper):#010x};"
        for name, first, upper in (("l0", 0, 0), ("l1", 4, 0), ("h0", 0, 1), ("h1", 4, 1))
    ]
    registers = ".reg .b32 l0, l1, h0, h1, none, n, lo, hi, s, t, u;"
    body = [registers, *table, "mov.b32 none, 0x80008000;", *lines]
    return tl.constexpr("\n".join(("{", *body, "}")))


WORD_4 = _text(
    POINTS[4], ["and.b32 u, $4, 0x77777777;", *_eight_text("u", 0, "$5", signs="$4")]
)  # fmt: skip
"""A word of 4-bit codes and the number, twice in a word -> its four pairs, in bf16."""
SIGNED = (*POINTS[3], *(-point for point in POINTS[3]))
WORD_3 = _text(SIGNED, ["and.b32 u, $4, 0x77777777;", *_eight_text("u", 0, "$5")])
"""The same of a word of 3-bit codes with their signs; the fourth bits are passed by."""


@triton.jit
def _point(place, BITS: tl.constexpr):
    """The point at a place of POINTS: place in int32; bits above the place's are passed by."""
    one = (place & 1) != 0
    two = (place & 2) != 0
    if BITS == 3:
        return tl.where(two, tl.where(one, P3[3], P3[2]), tl.where(one, P3[1], P3[0]))
    else:
        low = tl.where(two, tl.where(one, P4[3], P4[2]), tl.where(one, P4[1], P4[0]))
        high = tl.where(two, tl.where(one, P4[7], P4[6]), tl.where(one, P4[5], P4[4]))
        return tl.where((place & 4) != 0, high, low)


@triton.jit
def _places(size, norm, BITS: tl.constexpr):
    """How many of the thresholds times norm are below size: fp32 -> int32."""
    if BITS == 3:
        found = (size > norm * ((P3[0] + P3[1]) / 2)).to(tl.int32)
        found += (size > norm * ((P3[1] + P3[2]) / 2)).to(tl.int32)
        return found + (size > norm * ((P3[2] + P3[3]) / 2)).to(tl.int32)
    else:
        found = (size > norm * ((P4[0] + P4[1]) / 2)).to(tl.int32)
        for i in tl.static_range(1, 7):
            found += (size > norm * ((P4[i] + P4[i + 1]) / 2)).to(tl.int32)
        return found


@triton.jit
def _pair_sums(x, STEP: tl.constexpr):
    """x [rows, N] fp32, N a power of two -> [rows, 1]: neighbours are added, then their sums; STEP
    is 1.

    Sums stay in both places of a pair, so that all of a row are the sum in the end. Its maximum
    lies as the row does. Sums of fewer and fewer places would end in a layout of their own, which
    the compiler gives to all that is compared with them: a whole row in every thread.
    """
    if STEP == x.shape[1]:
        return tl.max(x, 1)[:, None]
    else:
        pairs = tl.reshape(x, (x.shape[0], x.shape[1] // (2 * STEP), 2, STEP))
        total = tl.broadcast_to(tl.sum(pairs, 2)[:, :, None, :], pairs.shape)
        return _pair_sums(tl.reshape(total, x.shape), 2 * STEP)


@triton.jit
def _power(exponent):
    """2^(e - 127)."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_words(place, sign, codes, live, HEADS: tl.constexpr, D: tl.constexpr,
                 BITS: tl.constexpr):  # fmt: skip
    """Points' places and signs [.., N] int32 of heads, packed as bits.py says."""
    LANES: tl.constexpr = max(D // 32, 1)
    SLOTS: tl.constexpr = D // (8 * LANES)
    place = tl.reshape(place, (HEADS, SLOTS, LANES, 8))
    sign = tl.reshape(sign, (HEADS, SLOTS, LANES, 8))
    at = tl.arange(0, 8)[None, None, None, :]
    slot = tl.arange(0, SLOTS)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    if BITS == 4:
        words = tl.sum((place << 4 * at) | (sign << (8 * (at % 4) + 7 - 4 * (at // 4))), 3)
        tl.store(codes[:, :, None] + lane * SLOTS + slot, words, mask=live[:, :, None])
    else:
        code = place | (sign << 2)
        words = tl.sum(code << 4 * at, 3)
        for plane in tl.static_range(min(SLOTS, 3)):
            fourth = tl.sum(((code >> plane) & 1) << (4 * at + 3), 3)
            part = tl.where(slot == plane, words, tl.where(slot == 3, fourth, 0))
            first = codes + plane * LANES + tl.arange(0, LANES)[None]
            tl.store(first, tl.sum(part, 1), mask=live)


@triton.jit
def _store(values, codes, numbers, seed, live, D: tl.constexpr, BITS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """See KVDevice: heads [HEADS, D] in blocks of BLOCK numbers, of all where D is less."""
    HEADS: tl.constexpr = values.shape[0]
    N: tl.constexpr = min(D, BLOCK)
    COUNT: tl.constexpr = D // N
    x = tl.reshape(values, (HEADS * COUNT, N))
    exponent = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)[:, None] >> 23
    lost = exponent > MOST
    usable = (exponent >= LEAST) & (exponent <= MOST)
    exponent = tl.where(usable, exponent, 127)
    scaled = tl.where(usable, x, 0.0) * _power(255 - exponent)
    norm = tl.sqrt_rn(_pair_sums(scaled * scaled, 1))
    d = tl.broadcast_to(tl.arange(0, D)[None], (HEADS, D))
    flip = tl.reshape(flips(seed, d), (HEADS * COUNT, N))
    turned = mixed(flipped(scaled, flip), N)
    place = _places(tl.abs(turned), norm, BITS)
    point = _point(place, BITS)
    number = tl.div_rn(norm, tl.sqrt_rn(_pair_sums(point * point, 1))) * _power(exponent - 1)
    number = tl.where(usable, number, 0.0).to(tl.int32, bitcast=True)
    number = (number + 0x7FFF + ((number >> 16) & 1)) >> 16
    number = tl.reshape(tl.where(lost, 0x7FC0, number), (HEADS, COUNT))
    number = number.to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(numbers + tl.arange(0, COUNT)[None], number, mask=live)
    _store_words(place, (turned < 0).to(tl.int32), codes, live, HEADS, D, BITS)


@triton.jit
def _signed(word, at: tl.constexpr, number, BITS: tl.constexpr):
    """Code `at` of a word, unpacked: fp32."""
    value = _point(word >> 4 * at, BITS) * number
    if BITS == 4:
        negative = (word >> (8 * (at % 4) + 7 - 4 * (at // 4))) & 1
    else:
        negative = (word >> (4 * at + 2)) & 1
    return flipped(value, negative << 31)


@triton.jit
def _join8(v0, v1, v2, v3, v4, v5, v6, v7):
    """Eight of a word in their order: [..., 2, 2, 2]."""
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.join(even, odd)


@triton.jit
def _eight(word, number, BITS: tl.constexpr):
    """The eight codes of words [T, W], unpacked: [T, W, 2, 2, 2] fp32."""
    return _join8(
        _signed(word, 0, number, BITS),
        _signed(word, 1, number, BITS),
        _signed(word, 2, number, BITS),
        _signed(word, 3, number, BITS),
        _signed(word, 4, number, BITS),
        _signed(word, 5, number, BITS),
        _signed(word, 6, number, BITS),
        _signed(word, 7, number, BITS),
    )


@triton.jit
def _fetched_numbers(numbers, live, D: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers beside a head's codes, by words of two: copies that run ahead take 4 bytes or
    more, and a page holds whole words. Of one block, its word and the bit where it begins."""
    if D > BLOCK:
        words = numbers.to(tl.pointer_type(tl.int32), bitcast=True)
        first = tl.load(words, mask=live, other=0)
        if D > 2 * BLOCK:
            return first, tl.load(words + 1, mask=live, other=0)
        else:
            return first, first
    else:
        address = numbers.to(tl.int64)
        word = (address & -4).to(tl.pointer_type(tl.int32))
        return tl.load(word, mask=live, other=0), (address & 2).to(tl.int32) * 8


@triton.jit
def _number(words, octet, D: tl.constexpr, BLOCK: tl.constexpr):
    """The number of a lane's octet, 0 .. 3: twice in a word. words: of _fetched_numbers."""
    if D > BLOCK:
        block = octet // (4 * BLOCK // D)
        if D > 2 * BLOCK:
            word = tl.where(block < 2, words[0], words[1])
        else:
            word = words[0]
        number = (word >> (block % 2 * 16)) & 0xFFFF
    else:
        number = (words[0] >> words[1]) & 0xFFFF
    return number | (number << 16)


@triton.jit
def _joined(a, b, c, d, D: tl.constexpr):
    """Four of each lane [T, D / 32] -> [T, D / 8]."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], D // 8))


@triton.jit
def _fetch(codes, numbers, columns, live, D: tl.constexpr, BITS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """See KVDevice: words, then _fetched_numbers."""
    found = ()
    for plane in tl.static_range(1 if BITS == 4 else min(3, D // 8)):
        at = codes + plane * max(D // 32, 1) + columns
        found = found + (tl.load(at, mask=live, other=0),)
    return found + _fetched_numbers(numbers, live, D, BLOCK)


@triton.jit
def _words(found, columns, D: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Words of eight codes [T, D / 8] in the order in which octets are stored, and the number of
    each, twice in a word."""
    if BITS == 4:
        return found[0], _number(found[1:], columns % 4, D, BLOCK)
    elif D < 32:
        words = tl.reshape(tl.join(found[0], found[1]), (found[0].shape[0], 2))
        return words, _number(found[2:], 0, D, BLOCK)
    else:
        a = found[0]
        b = found[1]
        c = found[2]
        d = ((a >> 3) & 0x11111111) | ((b >> 2) & 0x22222222) | ((c >> 1) & 0x44444444)
        none = a & 0
        number = _joined(
            _number(found[3:], 0, D, BLOCK) | none, _number(found[3:], 1, D, BLOCK) | none,
            _number(found[3:], 2, D, BLOCK) | none, _number(found[3:], 3, D, BLOCK) | none, D,
        )  # fmt: skip
        return _joined(a, b, c, d, D), number


@triton.jit
def _in_order(values, D: tl.constexpr):
    """The numbers of _words [T, D / 8, 2, 2, 2] -> [T, D], octets in their own order."""
    if D < 32:
        return tl.reshape(values, (values.shape[0], D))
    else:
        octets = tl.reshape(values, (values.shape[0], D // 32, 4, 8))
        return tl.reshape(tl.permute(octets, (0, 2, 1, 3)), (values.shape[0], D))


@triton.jit
def _unpack(found, columns, D: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """See KVDevice."""
    words, number = _words(found, columns, D, BITS, BLOCK)
    number = (number << 16).to(tl.float32, bitcast=True)
    return _in_order(_eight(words, number, BITS), D)


@triton.jit
def _pairs(p0, p1, p2, p3):
    """Pairs of a word's eight numbers -> [T, W, 2, 2, 2] in bf16."""
    l0, h0 = split_16bit(p0, tl.bfloat16)
    l1, h1 = split_16bit(p1, tl.bfloat16)
    l2, h2 = split_16bit(p2, tl.bfloat16)
    l3, h3 = split_16bit(p3, tl.bfloat16)
    return _join8(l0, h0, l1, h1, l2, h2, l3, h3)


@triton.jit
def _unpack_bf16(found, columns, D: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """_unpack in bf16, two numbers by an instruction."""
    TEXT: tl.constexpr = WORD_4 if BITS == 4 else WORD_3
    words, number = _words(found, columns, D, BITS, BLOCK)
    p0, p1, p2, p3 = tl.inline_asm_elementwise(
        TEXT, "=&r,=&r,=&r,=&r,r,r", [words, number],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return _in_order(_pairs(p0, p1, p2, p3), D)


@triton.jit
def store_keys_3(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    _store(values, codes, numbers, constant, live, D, 3, WHOLE_HEAD)


@triton.jit
def store_keys_4(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    _store(values, codes, numbers, constant, live, D, 4, WHOLE_HEAD)


@triton.jit
def store_values_3(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    _store(values, codes, numbers, constant, live, D, 3, OF_VALUES)


@triton.jit
def store_values_4(values, codes, numbers, constant, live, lanes, D: tl.constexpr):
    """See KVDevice."""
    _store(values, codes, numbers, constant, live, D, 4, OF_VALUES)


@triton.jit
def fetch_keys_3(codes, numbers, columns, live, D: tl.constexpr):
    """See KVDevice."""
    return _fetch(codes, numbers, columns, live, D, 3, WHOLE_HEAD)


@triton.jit
def unpack_keys_3(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack(found, columns, D, 3, WHOLE_HEAD)


@triton.jit
def unpack_keys_3_bf16(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack_bf16(found, columns, D, 3, WHOLE_HEAD)


@triton.jit
def fetch_keys_4(codes, numbers, columns, live, D: tl.constexpr):
    """See KVDevice."""
    return _fetch(codes, numbers, columns, live, D, 4, WHOLE_HEAD)


@triton.jit
def unpack_keys_4(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack(found, columns, D, 4, WHOLE_HEAD)


@triton.jit
def unpack_keys_4_bf16(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack_bf16(found, columns, D, 4, WHOLE_HEAD)


@triton.jit
def fetch_values_3(codes, numbers, columns, live, D: tl.constexpr):
    """See KVDevice."""
    return _fetch(codes, numbers, columns, live, D, 3, OF_VALUES)


@triton.jit
def unpack_values_3(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack(found, columns, D, 3, OF_VALUES)


@triton.jit
def unpack_values_3_bf16(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack_bf16(found, columns, D, 3, OF_VALUES)


@triton.jit
def fetch_values_4(codes, numbers, columns, live, D: tl.constexpr):
    """See KVDevice."""
    return _fetch(codes, numbers, columns, live, D, 4, OF_VALUES)


@triton.jit
def unpack_values_4(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack(found, columns, D, 4, OF_VALUES)


@triton.jit
def unpack_values_4_bf16(found, columns, constant, D: tl.constexpr):
    """See KVDevice."""
    return _unpack_bf16(found, columns, D, 4, OF_VALUES)


KEYS_3 = KVDevice(store_keys_3, 32, fetch_keys_3, unpack_keys_3, unpack_keys_3_bf16)
KEYS_4 = KVDevice(store_keys_4, 8, fetch_keys_4, unpack_keys_4, unpack_keys_4_bf16)
VALUES_3 = KVDevice(store_values_3, 32, fetch_values_3, unpack_values_3, unpack_values_3_bf16)
VALUES_4 = KVDevice(store_values_4, 8, fetch_values_4, unpack_values_4, unpack_values_4_bf16)
