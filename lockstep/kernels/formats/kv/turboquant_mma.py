# mypy: ignore-errors
"""turboquant.py as operands of mma.sync, in Gluon: see KVFragments.

A word holds an octet of a head; octets 2 g and 2 g + 1 make the g-th group of 16 columns that one
product adds. The four lanes of a key take a half of a word each, so that a group's numbers come to
stand where the product wants them. Of values a thread takes the words of two tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lockstep.kernels.device.mma_layouts import LEFT, bases, four_of, log2
from lockstep.kernels.formats.kv import KVFragments
from lockstep.kernels.formats.kv.turboquant import POINTS
from lockstep.kernels.formats.kv.turboquant_triton import SIGNED, _bytes_of


def _text(points, declared, lines):
    """PTX with the points' bytes in registers: lower ones in l0 and l1, upper ones in h0 and h1."""
    table = [
        f"mov.b32 {name}, {_bytes_of(points[first : first + 4], upper):#010x};"
        for name, first, upper in (("l0", 0, 0), ("l1", 4, 0), ("h0", 0, 1), ("h1", 4, 1))
    ]
    registers = f".reg .b32 l0, l1, h0, h1, none, lo, hi, s, t, {declared};"
    body = [registers, *table, "mov.b32 none, 0x80008000;", *lines]
    return gl.constexpr("\n".join(("{", *body, "}")))


def _found(selectors, signs=None, shift=0):
    """PTX: the bytes of four points, with the signs of a register that is shifted first."""
    lines = [f"prmt.b32 lo, l0, l1, {selectors};", f"prmt.b32 hi, h0, h1, {selectors};"]
    if signs:
        lines.append(f"shl.b32 s, {signs}, {shift};")
        lines.append("lop3.b32 hi, s, 0x80808080, hi, 0x6a;")
    return lines


def _product(out, order, number):
    """PTX: a pair of points times the number beside it, twice in a word."""
    return [f"prmt.b32 t, lo, hi, {order};", f"fma.rn.bf16x2 ${out}, t, {number}, none;"]


HALF_4 = _text(
    POINTS[4],
    "u",
    [
        "shr.u32 u, $2, $4;",
        "and.b32 u, u, 0x7777;",
        *_found("u", "$2", "$5"),
        *_product(0, "0x5140", "$3"),
        *_product(1, "0x7362", "$3"),
    ],
)
"""A half of a word of 4-bit codes -> two pairs. $3: the number, twice in a word; $4: where the half
begins, $5: how far its signs are from the upper bits of bytes."""
HALF_3 = _text(
    SIGNED,
    "u",
    [
        "shr.u32 u, $2, $4;",
        "and.b32 u, u, 0x7777;",
        *_found("u"),
        *_product(0, "0x5140", "$3"),
        *_product(1, "0x7362", "$3"),
    ],
)
"""The same of 3-bit codes with their signs."""


def _two_tokens(first, second, number, signs):
    """PTX: words of two tokens -> eight pairs of both tokens' numbers."""
    lines = [f"prmt.b32 z0, {first}, {second}, 0x5410;", f"prmt.b32 z1, {first}, {second}, 0x7632;"]
    for half, order in enumerate(("0x5140", "0x7362")):
        lines.append(f"prmt.b32 u, {first}, {second}, {order};")
        lines.append("and.b32 u, u, 0x77777777;")
        for quarter in range(2):
            at = 4 * half + 2 * quarter
            lines += _found("u", f"z{quarter}", 4 * half) if signs else _found("u")
            lines += _product(at, "0x6240", number)
            lines += _product(at + 1, "0x7351", number)
            if quarter == 0:
                lines.append("shr.u32 u, u, 16;")
    return lines


WORDS_4 = _text(POINTS[4], "u, z0, z1", _two_tokens("$8", "$9", "$10", signs=True))
"""Words of 4-bit codes of two tokens, and their numbers -> eight pairs."""
HALVES_3 = _text(
    SIGNED,
    "u, v",
    [
        "shr.u32 u, $4, $7;",
        "shr.u32 v, $5, $7;",
        "prmt.b32 u, u, v, 0x5140;",
        "and.b32 u, u, 0x77777777;",
        *_found("u"),
        *_product(0, "0x6240", "$6"),
        *_product(1, "0x7351", "$6"),
        "shr.u32 u, u, 16;",
        *_found("u"),
        *_product(2, "0x6240", "$6"),
        *_product(3, "0x7351", "$6"),
    ],
)
"""Halves of words of 3-bit codes of two tokens -> four pairs."""


@gluon.constexpr_function
def _words_of_keys(words, first):
    """Halves of words [16, words, 2]: halves and words `first` apart in four lanes."""
    lanes = bases(3, (2, 1), (1, first), (0, 1), (0, 2), (0, 4))
    rest = [(1, 1 << i) for i in range(log2(words)) if 1 << i != first]
    return gl.DistributedLinearLayout(bases(3, (0, 8), *rest), lanes, [], [], [16, words, 2])


@gluon.constexpr_function
def _halves_of_keys(lane):
    """The same as [16, D / 32, 4, 2]: groups of 32 codes, words of a group, halves."""
    lanes = bases(4, (3, 1), (1, 1), (0, 1), (0, 2), (0, 4))
    rest = [(1, 1 << i) for i in range(1, log2(lane))]
    registers = bases(4, (0, 8), (2, 1), (2, 2), *rest)
    return gl.DistributedLinearLayout(registers, lanes, [], [], [16, lane, 4, 2])


@gluon.constexpr_function
def _words_of_values(words):
    """Words [words, 16]: pairs of tokens in a thread, eight words in lanes."""
    lanes = bases(2, (1, 2), (1, 4), (0, 1), (0, 2), (0, 4))
    rest = [(0, 1 << i) for i in range(3, log2(words))]
    return gl.DistributedLinearLayout(bases(2, (1, 1), (1, 8), *rest), lanes, [], [], [words, 16])


@gluon.constexpr_function
def _planes_of_values(lane):
    """Halves of words [D / 32, 16, 2] of a plane: pairs of tokens in a thread."""
    lanes = bases(3, (1, 2), (1, 4), (0, 1), (0, 2), (2, 1))
    rest = [(0, 1 << i) for i in range(2, log2(lane))]
    return gl.DistributedLinearLayout(bases(3, (1, 1), (1, 8), *rest), lanes, [], [], [lane, 16, 2])


@gluon.constexpr_function
def _halves_of_values(lane):
    """The same as [D / 32, 4, 16, 2]: groups of 32 codes, words of a group, tokens, halves."""
    lanes = bases(4, (2, 2), (2, 4), (0, 1), (0, 2), (3, 1))
    rest = [(0, 1 << i) for i in range(2, log2(lane))]
    registers = bases(4, (2, 1), (1, 1), (2, 8), (1, 2), *rest)
    return gl.DistributedLinearLayout(registers, lanes, [], [], [lane, 4, 16, 2])


@gluon.constexpr_function
def _without(layout, *dimensions):
    """The layout less these dimensions, the last first."""
    for dimension in dimensions:
        layout = gl.SliceLayout(dimension, layout)
    return layout


@gluon.jit
def _fourth(a, b, c):
    """The words whose codes lie in the fourth bits of three planes'."""
    return ((a >> 3) & 0x11111111) | ((b >> 2) & 0x22222222) | ((c >> 1) & 0x44444444)


@gluon.jit
def _key_words(codes, i: gl.constexpr, D: gl.constexpr, BITS: gl.constexpr):
    """Words of 16 keys [16, D / 32, 4, 2], the same in both halves."""
    LANES: gl.constexpr = D // 32
    if BITS == 4:
        layout: gl.constexpr = _words_of_keys(4 * LANES, 4)
        word = codes.index(0).slice(16 * i, 16).load(gl.SliceLayout(2, layout))[:, :, None]
        twice = word | gl.zeros((16, 4 * LANES, 2), gl.int32, layout)
        found = gl.reshape(twice, (16, LANES, 4, 2))
    else:
        layout: gl.constexpr = _words_of_keys(LANES, 1)
        none = gl.zeros((16, LANES, 2), gl.int32, layout)
        inner: gl.constexpr = gl.SliceLayout(2, layout)
        a = codes.index(0).slice(16 * i, 16).load(inner)[:, :, None]
        b = codes.index(1).slice(16 * i, 16).load(inner)[:, :, None]
        c = codes.index(2).slice(16 * i, 16).load(inner)[:, :, None]
        d = _fourth(a, b, c)
        four = gl.join(gl.join(a | none, c | none), gl.join(b | none, d | none))
        found = gl.permute(gl.reshape(four, (16, LANES, 2, 4)), (0, 1, 3, 2))
    return gl.convert_layout(found, _halves_of_keys(LANES))


@gluon.jit
def _keys(codes, numbers, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr,
          BITS: gl.constexpr):  # fmt: skip
    """See KVFragments."""
    LANES: gl.constexpr = D // 32
    layout: gl.constexpr = _halves_of_keys(LANES)
    word = _key_words(codes, i, D, BITS)
    inner: gl.constexpr = _without(layout, 3, 2, 1)
    token = 16 * i + gl.arange(0, 16, inner)
    number = numbers.index(0).slice(16 * i, 16).load(inner)
    number = (number >> ((token * HKV + kv) % 2 * 16)) & 0xFFFF
    number = (number | (number << 16))[:, None][:, :, None][:, :, :, None]
    half = gl.arange(0, 2, _without(layout, 2, 1, 0))[None, :][:, None, :][:, :, None, :]
    if BITS == 4:
        p0, p1 = gl.inline_asm_elementwise(
            HALF_4, "=&r,=&r,r,r,r,r", [word, number, 16 * half, 4 * half],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        p0, p1 = gl.inline_asm_elementwise(
            HALF_3, "=&r,=&r,r,r,r", [word, number, 16 * half],
            dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    four = gl.reshape(four_of(p0, p1), (16, LANES // 2, 2, 4, 2, 2, 2))
    found = gl.reshape(gl.permute(four, (0, 3, 1, 6, 2, 4, 5)), (16, D))
    return gl.convert_layout(found, LEFT)


@gluon.jit
def _value_numbers(numbers, i: gl.constexpr, word, layout: gl.constexpr, D: gl.constexpr):
    """The numbers of words `word` [W, 1] of 16 tokens, in bf16 [W, 16]. word: 0 .. 3 of a group of
    32 codes. layout: of [W, 16]."""
    inner: gl.constexpr = gl.SliceLayout(0, layout)
    found = numbers.index(0).slice(16 * i, 16).load(inner)[None, :]
    block = word * (D // 64) // 4
    if D > 128:
        second = numbers.index(1).slice(16 * i, 16).load(inner)[None, :]
        found = gl.where(block < 2, found, second)
    found = (found >> (block % 2 * 16)).to(gl.int16)
    return found.to(gl.bfloat16, bitcast=True)


@gluon.jit
def values_4(codes, numbers, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """See KVFragments: number c of word w at c D / 8 + w."""
    WORDS: gl.constexpr = D // 8
    layout: gl.constexpr = _words_of_values(WORDS)
    word = codes.index(0).slice(16 * i, 16).permute((1, 0)).load(layout)
    at = gl.arange(0, WORDS, gl.SliceLayout(1, layout))[:, None] % 4
    number = _value_numbers(numbers, i, at, layout, D)
    v0, v1, v2, v3, v4, v5, v6, v7 = gl.inline_asm_elementwise(
        WORDS_4, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r", [word, number],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
               gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip
    even = gl.join(gl.join(v0, v4), gl.join(v2, v6))
    odd = gl.join(gl.join(v1, v5), gl.join(v3, v7))
    eight = gl.permute(gl.join(even, odd), (2, 3, 4, 0, 1))
    return gl.convert_layout(gl.reshape(eight, (D, 16)), LEFT)


@gluon.jit
def place_4(i, D: gl.constexpr):
    """See KVFragments."""
    word = i % (D // 8)
    return 8 * (word % 4 * (D // 32) + word // 4) + i // (D // 8)


@gluon.jit
def values_3(codes, numbers, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """See KVFragments: numbers 4 h + c of words j, four groups at a time."""
    LANES: gl.constexpr = D // 32
    plane: gl.constexpr = _planes_of_values(LANES)
    inner: gl.constexpr = gl.SliceLayout(2, plane)
    none = gl.zeros((LANES, 16, 2), gl.int32, plane)
    a = codes.index(0).slice(16 * i, 16).permute((1, 0)).load(inner)[:, :, None]
    b = codes.index(1).slice(16 * i, 16).permute((1, 0)).load(inner)[:, :, None]
    c = codes.index(2).slice(16 * i, 16).permute((1, 0)).load(inner)[:, :, None]
    d = _fourth(a, b, c)
    four = gl.join(gl.join(a | none, c | none), gl.join(b | none, d | none))
    layout: gl.constexpr = _halves_of_values(LANES)
    word = gl.permute(gl.reshape(four, (LANES, 16, 2, 4)), (0, 3, 1, 2))
    word = gl.convert_layout(word, layout)
    half = gl.arange(0, 2, _without(layout, 2, 1, 0))[None, :][:, None, :][:, :, None, :]
    of_words: gl.constexpr = _without(layout, 3, 0)
    at = gl.arange(0, 4, gl.SliceLayout(1, of_words))[:, None]
    number = _value_numbers(numbers, i, at, of_words, D)[None, :, :][:, :, :, None]
    v0, v1, v2, v3 = gl.inline_asm_elementwise(
        HALVES_3, "=&r,=&r,=&r,=&r,r,r,r,r,r", [word, number, 16 * half],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    found = gl.join(gl.join(v0, v2), gl.join(v1, v3))
    found = gl.reshape(found, (LANES // 4, 4, 4, 16, 2, 2, 2))
    found = gl.permute(found, (5, 6, 0, 2, 4, 1, 3))
    return gl.convert_layout(gl.reshape(found, (D, 16)), LEFT)


@gluon.jit
def place_3(i, D: gl.constexpr):
    """See KVFragments."""
    group = i % 4 + i // 32 % (D // 128) * 4
    octet = i // 8 % 4 * (D // 32) + group
    return 8 * octet + i // 4 % 2 * 4 + i // (D // 4)


@gluon.jit
def keys_4(codes, numbers, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """See KVFragments."""
    return _keys(codes, numbers, i, kv, HKV, D, 4)


@gluon.jit
def keys_3(codes, numbers, i: gl.constexpr, kv, HKV: gl.constexpr, D: gl.constexpr):
    """See KVFragments."""
    return _keys(codes, numbers, i, kv, HKV, D, 3)


BITS_4 = KVFragments(1, 8, keys_4, values_4, place_4, rows=8)
BITS_3 = KVFragments(3, 32, keys_3, values_3, place_3, rows=16)
"""rows, us of attention with its second kernel, 8B, 8 x 4 (16 rows), 16,384, against
quantized_hopper.py (H200): 4bit 165 and 145, k8v4 158 and 137, 3bit 124 and 169."""
