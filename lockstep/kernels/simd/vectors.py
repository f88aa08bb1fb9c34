# mypy: ignore-errors
"""Vector type of 16 fp32 lanes for Numba kernels, with loads and stores in the model's dtype.

LLVM maps a vector to the registers of the CPU: one with AVX-512, two with AVX2, four with NEON. A
kernel addresses memory by (dtype, address, index): the address of a tensor's first element, and an
index in elements. The dtypes are FLOATS' values; bf16 has none in NumPy, so uint16 represents it.
"""

import operator

import numpy as np
import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic, models, overload, register_model

from lockstep.kernels.simd.compiler import inline

LANES = 16
"""Lanes of a vector."""
F16 = np.float16
BF16 = np.uint16
F32 = np.float32
FLOATS = {torch.float16: F16, torch.bfloat16: BF16, torch.float32: F32}
"""Dtype of a tensor -> the dtype by which kernels load it."""

_FLOAT = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_I32, LANES)
_QUIET_NAN = 0x7FC0
"""A bf16 NaN, as torch rounds every NaN."""


class VectorType(types.Type):
    """Type of a vector of 16 fp32 lanes."""

    def __init__(self):
        super().__init__(name="fp32x16")


VECTOR = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    """Storage of a vector: an LLVM vector."""

    def __init__(self, manager, fe_type):
        super().__init__(manager, fe_type, _VECTOR)


def _storage(number_class):
    """Return (LLVM type of an element, its bytes) of a dtype argument."""
    dtype = number_class.dtype
    if dtype == types.float16:
        return ir.HalfType(), 2
    if dtype == types.uint16:
        return _I16, 2
    return _FLOAT, 4


def _pointer(builder, element, size, address, index):
    """Return the LLVM pointer to an element."""
    offset = builder.mul(index, _I64(size))
    return builder.inttoptr(builder.add(address, offset), element.as_pointer())


def _like(element, vector):
    """Return the vector type of an element type, or the type itself."""
    return ir.VectorType(element, LANES) if vector else element


def _ints(value, vector):
    """Return an i32 constant, splat if `vector`."""
    return ir.Constant(_INTS, [value] * LANES) if vector else _I32(value)


def _widen(builder, element, value, vector):
    """Convert loaded elements to fp32."""
    if element == _FLOAT:
        return value
    if element == _I16:
        wide = builder.zext(value, _like(_I32, vector))
        return builder.bitcast(builder.shl(wide, _ints(16, vector)), _like(_FLOAT, vector))
    return builder.fpext(value, _like(_FLOAT, vector))


def _round(builder, element, value, vector):
    """Round fp32 values to elements, to nearest even."""
    if element == _FLOAT:
        return value
    if element != _I16:
        return builder.fptrunc(value, _like(element, vector))
    bits = builder.bitcast(value, _like(_I32, vector))
    odd = builder.and_(builder.lshr(bits, _ints(16, vector)), _ints(1, vector))
    rounded = builder.add(builder.add(bits, _ints(0x7FFF, vector)), odd)
    rounded = builder.lshr(rounded, _ints(16, vector))
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.select(is_nan, _ints(_QUIET_NAN, vector), rounded)
    return builder.trunc(rounded, _like(_I16, vector))


def _splat(builder, value):
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, _I32(0))
    return builder.shuffle_vector(first, undefined, _ints(0, True))


def _call(builder, name, result, *args):
    """Call an LLVM intrinsic."""
    function_type = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


@intrinsic
def zeros(typingctx):
    """Return the vector of zeros."""

    def codegen(context, builder, signature, args):
        return ir.Constant(_VECTOR, [0.0] * LANES)

    return VECTOR(), codegen


@intrinsic
def splat(typingctx, value):
    """Return the vector whose lanes are all `value`."""

    def codegen(context, builder, signature, args):
        return _splat(builder, args[0])

    return VECTOR(types.float32), codegen


@intrinsic
def load(typingctx, dtype, address, index):
    """Load one element as fp32."""
    element, size = _storage(dtype)

    def codegen(context, builder, signature, args):
        value = builder.load(_pointer(builder, element, size, *args[1:]))
        return _widen(builder, element, value, False)

    return types.float32(dtype, types.int64, types.int64), codegen


@intrinsic
def store(typingctx, dtype, address, index, value):
    """Store one fp32 value, rounded to the dtype."""
    element, size = _storage(dtype)

    def codegen(context, builder, signature, args):
        pointer = _pointer(builder, element, size, *args[1:3])
        builder.store(_round(builder, element, args[3], False), pointer)
        return context.get_dummy_value()

    return types.void(dtype, types.int64, types.int64, types.float32), codegen


def _int_load(width):
    """Return the intrinsic that loads a signed integer of `width` bits."""

    @intrinsic
    def load_integer(typingctx, address, index):
        def codegen(context, builder, signature, args):
            pointer = _pointer(builder, ir.IntType(width), width // 8, *args)
            value = builder.load(pointer)
            return value if width == 64 else builder.sext(value, _I64)

        return types.int64(types.int64, types.int64), codegen

    return load_integer


load_int, load_int32 = _int_load(64), _int_load(32)


def _int_store(width):
    """Return the intrinsic that stores the low `width` bits of an integer."""

    @intrinsic
    def store_integer(typingctx, address, index, value):
        def codegen(context, builder, signature, args):
            pointer = _pointer(builder, ir.IntType(width), width // 8, *args[:2])
            value = args[2] if width == 64 else builder.trunc(args[2], ir.IntType(width))
            builder.store(value, pointer)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64), codegen

    return store_integer


store_int, store_int32 = _int_store(64), _int_store(32)


@intrinsic
def vload(typingctx, dtype, address, index):
    """Load 16 consecutive elements as fp32."""
    element, size = _storage(dtype)

    def codegen(context, builder, signature, args):
        pointer = _pointer(builder, _like(element, True), size, *args[1:])
        return _widen(builder, element, builder.load(pointer, align=size), True)

    return VECTOR(dtype, types.int64, types.int64), codegen


@intrinsic
def vload_codes(typingctx, address, index, shift, bits):
    """Load 16 consecutive 32-bit words, and convert the code in each of them to fp32.

    A code has the bits shift .. shift + bits - 1 of its word.
    """

    def codegen(context, builder, signature, args):
        address, index, shift, bits = args
        words = builder.load(_pointer(builder, _INTS, 4, address, index), align=4)
        one = ir.Constant(_I32, 1)
        mask = builder.sub(builder.shl(one, builder.trunc(bits, _I32)), one)
        codes = builder.lshr(words, _splat(builder, builder.trunc(shift, _I32)))
        codes = builder.and_(codes, _splat(builder, mask))
        # Codes are far below 2^31, and a signed conversion is one instruction of AVX2.
        return builder.sitofp(codes, _VECTOR)

    return VECTOR(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def vstore(typingctx, dtype, address, index, vector):
    """Store 16 lanes, rounded to the dtype."""
    element, size = _storage(dtype)

    def codegen(context, builder, signature, args):
        pointer = _pointer(builder, _like(element, True), size, *args[1:3])
        builder.store(_round(builder, element, args[3], True), pointer, align=size)
        return context.get_dummy_value()

    return types.void(dtype, types.int64, types.int64, VECTOR), codegen


def _mask(builder, count):
    """Return the mask of the first `count` lanes."""
    lanes = ir.Constant(ir.VectorType(_I64, LANES), list(range(LANES)))
    return builder.icmp_signed("<", lanes, _splat(builder, count))


_MASKED_NAMES = {2: {"half": "v16f16", "i16": "v16i16"}, 4: {"float": "v16f32"}}


def _masked_name(operation, element, size):
    return f"llvm.masked.{operation}.{_MASKED_NAMES[size][str(element)]}.p0"


@intrinsic
def vload_first(typingctx, dtype, address, index, count):
    """Load the first `count` of 16 elements. The others are not read; their lanes are 0."""
    element, size = _storage(dtype)
    vector = _like(element, True)

    def codegen(context, builder, signature, args):
        pointer = _pointer(builder, vector, size, *args[1:3])
        zero = ir.Constant(vector, [0.0 if element != _I16 else 0] * LANES)
        mask = _mask(builder, args[3])
        name = _masked_name("load", element, size)
        value = _call(builder, name, vector, pointer, _I32(size), mask, zero)
        return _widen(builder, element, value, True)

    return VECTOR(dtype, types.int64, types.int64, types.int64), codegen


@intrinsic
def vstore_first(typingctx, dtype, address, index, count, vector):
    """Store the first `count` lanes, rounded to the dtype."""
    element, size = _storage(dtype)

    def codegen(context, builder, signature, args):
        pointer = _pointer(builder, _like(element, True), size, *args[1:3])
        value = _round(builder, element, args[4], True)
        name = _masked_name("store", element, size)
        _call(builder, name, ir.VoidType(), value, pointer, _I32(size), _mask(builder, args[3]))
        return context.get_dummy_value()

    return types.void(dtype, types.int64, types.int64, types.int64, VECTOR), codegen


@intrinsic
def rounded(typingctx, dtype, vector):
    """Round lanes to the dtype and return them as fp32."""
    element, _ = _storage(dtype)

    def codegen(context, builder, signature, args):
        return _widen(builder, element, _round(builder, element, args[1], True), True)

    return VECTOR(dtype, VECTOR), codegen


@intrinsic
def round_scalar(typingctx, dtype, value):
    """Round one fp32 value to the dtype and return it as fp32."""
    element, _ = _storage(dtype)

    def codegen(context, builder, signature, args):
        return _widen(builder, element, _round(builder, element, args[1], False), False)

    return types.float32(dtype, types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """Compute a * b + c with one rounding, lane by lane."""

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.fma.v16f32", _VECTOR, *args)

    return VECTOR(VECTOR, VECTOR, VECTOR), codegen


@intrinsic
def fma_scalar(typingctx, a, b, c):
    """Compute a * b + c in fp32 with one rounding, of scalars."""

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.fma.f32", _FLOAT, *args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _lane_op(name):
    """Return the intrinsic of an arithmetic instruction on two vectors."""

    @intrinsic
    def lane_op(typingctx, a, b):
        def codegen(context, builder, signature, args):
            return getattr(builder, name)(*args)

        return VECTOR(VECTOR, VECTOR), codegen

    return lane_op


_add, _sub, _mul, _div = (_lane_op(name) for name in ("fadd", "fsub", "fmul", "fdiv"))


def _overload_operator(symbol, lane_op):
    """Let an operator of Python compute a lane_op."""

    @overload(symbol)
    def typed(a, b):
        if isinstance(a, VectorType) and isinstance(b, VectorType):
            return lambda a, b: lane_op(a, b)
        return None


for _symbol, _function in (
    (operator.add, _add),
    (operator.sub, _sub),
    (operator.mul, _mul),
    (operator.truediv, _div),
):
    _overload_operator(_symbol, _function)


def _extremum(comparison):
    """Return the intrinsic that keeps a's lane unless b's compares so to it. A NaN of a stays."""

    @intrinsic
    def extremum(typingctx, a, b):
        def codegen(context, builder, signature, args):
            first, second = args
            return builder.select(builder.fcmp_ordered(comparison, second, first), second, first)

        return VECTOR(VECTOR, VECTOR), codegen

    return extremum


vmax, vmin = _extremum(">"), _extremum("<")


@intrinsic
def power_of_two(typingctx, vector):
    """Return 2^n of the integers n in the low mantissa bits of lanes n + 1.5 * 2^23.

    n is between -126 and 127.
    """

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], _INTS)
        biased = builder.add(bits, _ints(127, True))
        return builder.bitcast(builder.shl(biased, _ints(23, True)), _VECTOR)

    return VECTOR(VECTOR), codegen


def _reduction(combine):
    """Return the intrinsic that combines 16 lanes as a binary tree of halves."""

    @intrinsic
    def reduction(typingctx, vector):
        def codegen(context, builder, signature, args):
            value = args[0]
            width = LANES
            while width > 1:
                width //= 2
                undefined = ir.Constant(value.type, ir.Undefined)
                indices = ir.VectorType(_I32, width)
                low, high = (
                    builder.shuffle_vector(
                        value, undefined, ir.Constant(indices, list(range(begin, begin + width)))
                    )
                    for begin in (0, width)
                )
                value = combine(builder, low, high)
            return builder.extract_element(value, _I32(0))

        return types.float32(VECTOR), codegen

    return reduction


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", b, a), b, a)


sum_lanes = _reduction(lambda builder, a, b: builder.fadd(a, b))
max_lanes = _reduction(_larger)


@inline
def vload_part(dtype, address, index, count):
    """Load up to 16 elements from `index` on: those below `count`, then zeros."""
    if index + LANES <= count:
        return vload(dtype, address, index)
    return vload_first(dtype, address, index, count - index)


@inline
def vstore_part(dtype, address, index, count, vector):
    """Store up to 16 lanes from `index` on: those below `count`."""
    if index + LANES <= count:
        vstore(dtype, address, index, vector)
    else:
        vstore_first(dtype, address, index, count - index, vector)
