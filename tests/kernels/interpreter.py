"""Speed up Triton's interpreter for the tests.

The results stay the same, except for casts from fp32 to bf16 (the interpreter truncates, a GPU
rounds to nearest) and the order in which tl.dot adds. An interpreted kernel spends nearly all of
its time on the language's types, repeatedly on the same few. Here equal types are one object, and
what depends on types only is computed once.
"""

from typing import Any

import numpy as np
import torch
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

MODULES = (language, core)
MAX_CONSTANTS = 4096
"""Maximum number of cached constant blocks; a kernel has tens."""


def speed_up() -> None:
    """Patch the interpreter and the language for the life of the process."""
    _convert_loop_bounds()
    _round_to_bfloat16()
    _multiply_by_mkl()
    _patch_language_once()
    _call_builtins_directly()
    _skip_overflow_checks()
    _cache_block_types()
    _compare_types_by_identity()
    _unwrap_common_types_first()
    _cache_shapes()
    _cache_dtypes()
    _create_handles_unchecked()
    _pass_operands_of_one_type()
    _cache_broadcast_shapes()


def _convert_loop_bounds() -> None:
    """Convert loop bounds by item(): numpy 2.4 refuses int() of a one-element array."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _round_to_bfloat16() -> None:
    """Cast between fp32 and bf16, which numpy lacks, with torch (ties to even)."""
    cast = interpreter.InterpreterBuilder.cast_impl
    float32 = language.float32
    bfloat16 = language.bfloat16

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair not in ((float32, bfloat16), (bfloat16, float32)):
            return cast(self, src, dst_type)
        arguments = torch.from_numpy(np.ascontiguousarray(src.data))
        if pair[0] == bfloat16:
            data = arguments.view(torch.bfloat16).float()
        else:
            data = arguments.to(torch.bfloat16).view(torch.uint16)
        return interpreter.TensorHandle(data.numpy(), dst_type.scalar)

    interpreter.InterpreterBuilder.cast_impl = cast_impl
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(interpreter.InterpreterBuilder, name, cast_impl)


def _multiply_by_mkl() -> None:
    """Run tl.dot with torch.

    On some CPUs (AMD Zen 5) numpy's OpenBLAS gives a row other bits depending on the other rows.
    MKL does not at the sizes of tl.dot.
    """

    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *args: Any) -> Any:
        if not (a.data.dtype.kind == b.data.dtype.kind == d.data.dtype.kind == "f"):
            return dot(self, a, b, d, *args)
        left = torch.from_numpy(a.data.astype(d.data.dtype))
        right = torch.from_numpy(b.data.astype(d.data.dtype))
        return interpreter.TensorHandle((left @ right).numpy() + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _patch_language_once() -> None:
    """Patch triton.language once per launch instead of at every call of a device function, where
    scanning all names finds nothing to patch."""
    patch_lang = interpreter._patch_lang
    seen: dict[int, list[Any]] = {}

    def patch(fn: Any) -> Any:
        names = fn.__globals__
        if id(names) not in seen:
            seen[id(names)] = [m for m in MODULES if any(value is m for value in names.values())]
        if any(core.is_builtin(module.load) for module in seen[id(names)]):
            return patch_lang(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch


def _call_builtins_directly() -> None:
    """Call builtins without the check that a semantic was passed, which the interpreter always
    does."""

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        run = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return run(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def _skip_overflow_checks() -> None:
    """Skip the 64-bit overflow check of integer sums, which has no effect unless options.debug is
    set."""
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def _cache_block_types() -> None:
    """Check and name each block type (element type, constant shape) once.

    sizes: its shape as integers.
    """
    build = core.block_type.__init__
    kept: dict[Any, Any] = {}

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = (type(element_ty), element_ty.name, sizes)
        if key not in kept:
            result = object.__new__(cls)
            build(result, element_ty, shape)
            result.sizes = sizes
            kept[key] = result
        return kept[key]

    core.block_type.__new__ = new
    core.block_type.__init__ = lambda self, element_ty, shape: None


def _compare_types_by_identity() -> None:
    """Compare by identity first, then as Triton does; compare shapes without wrapping them
    again."""
    for kind in (core.dtype, core.pointer_type, core.block_type):
        _compare_by_identity(kind)
    compare = core.tuple.__eq__

    def same(self: Any, other: Any) -> Any:
        if type(other) is core.tuple:
            return self.values == other.values
        return compare(self, other)

    core.tuple.__eq__ = same


def _compare_by_identity(kind: Any) -> None:
    compare = kind.__eq__
    kind.__eq__ = lambda self, other: self is other or compare(self, other)


def _unwrap_common_types_first() -> None:
    """Unwrap constants and pass tensors through before the rarer cases."""
    unwrap = core._unwrap_if_constexpr
    plain = {core.tensor, core.dtype, core.pointer_type, core.block_type}
    plain |= {int, float, bool, str, type(None)}

    def first(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        if kind is core.constexpr:
            return value.value
        return unwrap(value)

    core._unwrap_if_constexpr = first


def _cache_shapes() -> None:
    """Cache a tensor's shape by its type."""
    kept: dict[tuple[int, ...], tuple[Any, Any]] = {}
    build = core.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else ()
        if sizes not in kept:
            build(self, handle, type)
            kept[sizes] = (self.shape, self.numel)
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = kept[sizes]

    core.tensor.__init__ = init


def _cache_dtypes() -> None:
    """Cache the numpy dtype of an element type, which Triton looks up in a table that it builds per
    call."""
    find = interpreter._get_np_dtype
    kept: dict[tuple[type, str], Any] = {}

    def get(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        key = (type(scalar), scalar.name)
        if key not in kept:
            kept[key] = find(scalar)
        return kept[key]

    interpreter._get_np_dtype = get


def _create_handles_unchecked() -> None:
    """Create handles without the assertion that the array fits its type."""

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr

    interpreter.TensorHandle.__init__ = init


def _pass_operands_of_one_type() -> None:
    """Return operands of equal type unchanged; cache the constant that a number operand becomes."""
    check = TritonSemantic.binary_op_type_checking_impl
    kept: dict[Any, tuple[Any, Any]] = {}

    def operands(
        self: Any,
        lhs: Any,
        rhs: Any,
        left_pointer: bool = False,
        right_pointer: bool = False,
        arithmetic: bool = True,
        divided: bool = False,
    ) -> tuple[Any, Any]:
        options = (left_pointer, right_pointer, arithmetic, divided)
        left = type(lhs) is core.tensor
        right = type(rhs) is core.tensor
        if left == right:
            if not left:
                return check(self, lhs, rhs, *options)
            alike = lhs.dtype is rhs.dtype and not divided  # 16 bits by 16 bits are one of 32
            moved = left_pointer and lhs.dtype.is_ptr() and rhs.dtype.is_int()
            if moved or (alike and not lhs.dtype.is_ptr()):
                return self.broadcast_impl_value(lhs, rhs)
            return check(self, lhs, rhs, *options)
        arguments, number = (lhs, rhs) if left else (rhs, lhs)
        key = (left, arguments.type.name, type(number), number, *options)
        if key not in kept:
            result = check(self, lhs, rhs, *options)
            if len(kept) < MAX_CONSTANTS and number == number:
                constant = result[left]
                constant.handle.data.flags.writeable = False
                kept[key] = (result[not left].dtype, constant)
            return result
        dtype, constant = kept[key]
        arguments = arguments if dtype == arguments.dtype else self.cast(arguments, dtype)
        return (arguments, constant) if left else (constant, arguments)

    TritonSemantic.binary_op_type_checking_impl = operands


def _cache_broadcast_shapes() -> None:
    """Cache the common shape of two shapes; fill blocks directly."""
    kept: dict[Any, tuple[int, ...]] = {}

    def widen(self: Any, value: Any, sizes: tuple[int, ...], common: tuple[int, ...]) -> Any:
        if sizes == common:
            return value
        kind = core.block_type(value.dtype, list(common))
        make = self.builder.create_broadcast if sizes else self.builder.create_splat
        return core.tensor(make(value.handle, common) if sizes else make(kind, value.handle), kind)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type is rhs.type:
            return lhs, rhs
        left = lhs.type.sizes if lhs.type.is_block() else ()
        right = rhs.type.sizes if rhs.type.is_block() else ()
        key = (left, right)
        if key not in kept:
            kept[key] = np.broadcast_shapes(left, right)
        return widen(self, lhs, left, kept[key]), widen(self, rhs, right, kept[key])

    def splat(self: Any, kind: Any, value: Any) -> Any:
        data = np.empty(kind.sizes, interpreter._get_np_dtype(value.dtype))
        data[...] = value.data
        return interpreter.TensorHandle(data, value.dtype.scalar)

    def spread(self: Any, value: Any, shape: Any) -> Any:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        data = np.empty(sizes, value.data.dtype)
        data[...] = value.data
        return interpreter.TensorHandle(data, value.dtype.scalar)

    def expand_dims(self: Any, value: Any, axis: int) -> Any:
        sizes = list(value.data.shape)
        sizes.insert(axis, 1)
        return interpreter.TensorHandle(value.data.reshape(sizes), value.dtype.scalar)

    TritonSemantic.broadcast_impl_value = broadcast
    builder = interpreter.InterpreterBuilder
    builder.create_splat = splat
    builder.create_broadcast = spread
    builder.create_expand_dims = expand_dims
