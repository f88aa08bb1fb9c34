"""Triton's interpreter made fast enough for the tests; what a kernel computes stays the same, but
for casts from fp32 to bf16, which it cuts off where a GPU rounds to nearest.

An interpreted kernel spends nearly all of its time on building the language's types, over and over
the same few. Here equal ones are built once.
"""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from triton import language
from triton.language import core
from triton.runtime import interpreter

MODULES = (language, core)


def speed_up() -> None:
    """Patches the interpreter and the language for the life of the process."""
    _index_by_one_element()
    _round_to_bfloat16()
    _patch_the_language_once()
    _call_builtins_directly()
    _sanitize_nothing_that_is_not_asserted()
    _keep_block_types()
    _keep_shapes()
    _keep_dtypes()


def _index_by_one_element() -> None:
    """Loop bounds: numpy 2.4 refuses int() of a one-element array."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _round_to_bfloat16() -> None:
    """Casts between fp32 and bf16, which numpy lacks: by torch, ties to even."""
    cast = interpreter.InterpreterBuilder.cast_impl
    float32 = language.float32
    bfloat16 = language.bfloat16

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = (src.dtype.scalar, dst_type.scalar)
        if pair not in ((float32, bfloat16), (bfloat16, float32)):
            return cast(self, src, dst_type)
        given = torch.from_numpy(numpy.ascontiguousarray(src.data))
        if pair[0] == bfloat16:
            data = given.view(torch.bfloat16).float()
        else:
            data = given.to(torch.bfloat16).view(torch.uint16)
        return interpreter.TensorHandle(data.numpy(), dst_type.scalar)

    interpreter.InterpreterBuilder.cast_impl = cast_impl
    for name in ("create_fp_ext", "create_fp_trunc"):
        setattr(interpreter.InterpreterBuilder, name, cast_impl)


def _patch_the_language_once() -> None:
    """Puts the interpreter's functions into triton.language once a launch, not at every call of a
    device function: there it finds nothing to do, after looking at every name of the language."""
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
    """The interpreter gives each builtin its semantic: the check that it was given is passed by."""

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        run = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return run(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


def _sanitize_nothing_that_is_not_asserted() -> None:
    """The interpreter computes every sum of integers again in 64 bits, to assert that it fits; but
    device_assert looks at nothing unless options.debug is set."""
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )


def _keep_block_types() -> None:
    """A block type of an element type and a shape of plain numbers is checked and named once."""
    build: Callable[..., None] = core.block_type.__init__
    kept: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = (type(element_ty), element_ty.name, sizes)
        if key not in kept:
            build(self, element_ty, shape)
            kept[key] = dict(self.__dict__)
        self.__dict__.update(kept[key])

    core.block_type.__init__ = init


def _keep_shapes() -> None:
    """A tensor's shape, of constants, follows from its type's."""
    kept: dict[tuple[int, ...], tuple[Any, Any]] = {}
    build: Callable[..., None] = core.tensor.__init__

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in kept:
            build(self, handle, type)
            kept[sizes] = (self.shape, self.numel)
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        self.shape, self.numel = kept[sizes]

    core.tensor.__init__ = init


def _keep_dtypes() -> None:
    """The numpy dtype of an element type, found without a table built for each question."""
    find = interpreter._get_np_dtype
    kept: dict[tuple[type, str], Any] = {}

    def get(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        key = (type(scalar), scalar.name)
        if key not in kept:
            kept[key] = find(scalar)
        return kept[key]

    interpreter._get_np_dtype = get
