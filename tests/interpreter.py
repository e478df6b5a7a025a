"""Makes Triton's interpreter faster: less time for kernels that call device functions.

What it computes stays as it is. Versions of Triton that lack what is named here are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from inspect import ismodule
from typing import Any
from unittest.mock import patch

import torch


def make_faster() -> None:
    """Where Triton 3.7 does again at every operation what it could do once, let it do that once."""
    try:
        from triton.runtime import interpreter

        for change in (
            patch_language_once,
            leave_out_unread_checks,
            make_handles_directly,
            remember_types,
            call_builtins_directly,
            broadcast_at_once,
            see_equal_types,
            remember_constants,
        ):
            change(interpreter)
    except (ImportError, AttributeError):
        return


def patch_language_once(interpreter: Any) -> None:
    """Let a launch replace the functions of `triton.language` once, and not again at every call of a device function.

    Triton does both, and restores them at a launch's end; the second changes nothing.
    """
    replace_functions, scope_type, language = interpreter._patch_lang, interpreter._LangPatchScope, interpreter.tl
    patched: set[str] = set()  # modules, in the launch under way
    names_of: dict[Any, set[str]] = {}

    class Launch(scope_type):  # type: ignore[misc, valid-type]
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_unless_patched(function: Any) -> Any:
        if function not in names_of:
            modules = [value for value in function.__globals__.values() if ismodule(value)]
            names_of[function] = {module.__name__ for module in modules if module in (language, language.core)}
        if names_of[function] <= patched:
            return scope_type()
        patched.update(names_of[function])
        changes = replace_functions(function)
        launch = Launch()
        launch._changes = changes._changes
        return launch

    interpreter._patch_lang = patch_unless_patched


def leave_out_unread_checks(interpreter: Any) -> None:
    """Integers are added in 64 bits as well, to assert that 32 were enough: only in debug mode is this asserted."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def make_handles_directly(interpreter: Any) -> None:
    """Take arrays without asking whether their numbers are as wide as their type: operations have seen to that."""

    def handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter.TensorHandle.__init__ = handle


def remember_types(interpreter: Any) -> None:
    """Make a type of a block, and what a tensor of a type says about its shape, once each; both are never changed."""
    language = interpreter.tl
    core = language.core
    numpy_dtype, make_tensor, make_block = interpreter._get_np_dtype, core.tensor.__init__, core.block_type.__init__
    unwrap, equals = core._unwrap_if_constexpr, core.dtype.__eq__
    dtypes: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    no_constants = {int, float, bool, core.tensor, core.dtype, core.pointer_type, core.block_type}

    def numpy_dtype_of(dtype: Any) -> Any:
        found = dtypes.get(dtype.name)
        if found is None:
            found = dtypes[dtype.name] = numpy_dtype(dtype)
        return found

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size if size.__class__ is int else unwrap(size) for size in shape]
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        found = blocks.get(key)
        if found is None:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        else:
            self.__dict__.update(found)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.name if type.is_block() else None
        found = shapes.get(key)
        if found is None:
            make_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = found

    def unwrap_constexpr(value: Any) -> Any:
        return value if value.__class__ in no_constants else unwrap(value)

    interpreter._get_np_dtype = numpy_dtype_of
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    core._unwrap_if_constexpr = unwrap_constexpr
    core.dtype.__eq__ = lambda self, other: self is other or equals(self, other)


def call_builtins_directly(interpreter: Any) -> None:
    """Call what is behind a builtin of the language, which else asks again for what it is always given here."""
    semantic = interpreter.interpreter_semantic  # which 3.6 lacks

    def patch_attribute(holder: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(holder, name, call)

    interpreter._patch_attr = patch_attribute


def broadcast_at_once(interpreter: Any) -> None:
    """Remember the shape that two shapes become, which else is found out size by size, and let numpy fill it."""
    semantic, core, make = interpreter.interpreter_semantic, interpreter.tl.core, interpreter.TensorHandle
    broadcast, numpy, numpy_dtype = semantic.broadcast_impl_value, interpreter.np, interpreter._get_np_dtype
    shapes: dict[Any, Any] = {}
    types: dict[Any, Any] = {}

    def shape_of(value: Any) -> Any:
        sizes = value.type.__dict__.get("shape")
        return None if sizes is None else tuple(sizes.values)

    def grown(value: Any, shape: Any) -> Any:
        handle, dtype = value.handle, value.dtype
        data = numpy.empty(shape, handle.data.dtype if value.type.is_block() else numpy_dtype(handle.dtype))
        data[...] = handle.data
        key = dtype.name, getattr(dtype, "address_space", None), shape
        found = types.get(key)
        if found is None:
            found = types[key] = core.block_type(dtype, list(shape))
        return semantic.tensor(make(data, handle.dtype.scalar), found)

    def broadcast_both(lhs: Any, rhs: Any) -> Any:
        one, other = shape_of(lhs), shape_of(rhs)
        if one == other:
            return lhs, rhs
        shape = shapes.get((one, other))
        if shape is None:
            shape = shapes[one, other] = shape_of(broadcast(lhs, rhs)[0])
        return (lhs if one == shape else grown(lhs, shape), rhs if other == shape else grown(rhs, shape))

    def expand_dims(self: Any, value: Any, axis: int) -> Any:
        return make(value.data[(slice(None),) * axis + (None,)], value.dtype.scalar)

    semantic.broadcast_impl_value = broadcast_both
    interpreter.InterpreterBuilder.create_expand_dims = expand_dims


_INTEGERS = {"int32", "int64", "uint32", "uint64"}
_PLAIN = _INTEGERS | {"int1", "fp32", "fp64"}
"""Types of which two numbers make one of the same type, whatever the operation."""


def see_equal_types(interpreter: Any) -> None:
    """Hand operands of one type, and addresses and offsets, on without asking for the type that both become."""
    semantic, tensor, wide = interpreter.interpreter_semantic, interpreter.tl.tensor, interpreter.tl.int64
    check = semantic.binary_op_type_checking_impl

    def check_unless_equal(lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        if lhs.__class__ is tensor and rhs.__class__ is tensor:
            one, other = lhs.dtype, rhs.dtype
            if one is other and one.name in _PLAIN:
                return semantic.broadcast_impl_value(lhs, rhs)
            if {one.name, other.name} == {"int32", "int64"}:
                return semantic.broadcast_impl_value(semantic.cast(lhs, wide), semantic.cast(rhs, wide))
            if one.is_ptr() and other.name in _INTEGERS and args[:1] == (True,):
                return semantic.broadcast_impl_value(lhs, rhs)
        return check(lhs, rhs, *args, **options)

    semantic.binary_op_type_checking_impl = check_unless_equal


def remember_constants(interpreter: Any) -> None:
    """Make the block that a number becomes beside a tensor of one type once; nothing may write to it."""
    semantic, tensor = interpreter.interpreter_semantic, interpreter.tl.tensor
    check = semantic.binary_op_type_checking_impl
    constants: dict[Any, Any] = {}

    def check_with_constants(lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        if lhs.__class__ is not tensor or rhs.__class__ not in (int, float) or options:
            return check(lhs, rhs, *args, **options)
        key = (lhs.type.name, rhs.__class__, rhs, args)
        found = constants.get(key)
        if found is not None:
            return lhs, found
        one, other = check(lhs, rhs, *args)
        if one is lhs and (lhs.dtype.name in _PLAIN or lhs.dtype.is_ptr()):
            other.handle.data.flags.writeable = False
            constants[key] = other
        return one, other

    semantic.binary_op_type_checking_impl = check_with_constants


@contextmanager
def merging_two_at_once() -> Iterator[None]:
    """Within, where kernels are interpreted, suffixes' programs go through partials in pairs.

    As many as suit a GPU, up to 32, would take as long where there is one. The kernels' own tests merge so many.
    """
    if torch.cuda.is_available() or find_spec("triton") is None:
        yield
        return
    from hf_fastdecode.kernels.forest_decode import api

    choose = api.choose_suffix_config

    def merging_two(*args: Any, **options: Any) -> Any:
        return replace(choose(*args, **options), merge=2)

    with patch.object(api, "choose_suffix_config", merging_two):
        yield
