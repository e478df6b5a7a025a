"""Trials of a model's code, copies of it, and when a kernel runs in its place: what kinds of fused modules share.

A trial runs code of a model on random numbers, to find whether it computes a known formula. Code around such a formula
is copied: a function that a model's file defines is a global name of that file, and a copy of a module's ``forward``
can call another function by that name, while the file itself, and other models and threads, keep theirs. Whether a
module is unchanged is asked at every call, since hooks and methods may be put on it between passes, and within one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._compat import SET_BY_ZERO, setting, uncompiled_call
from ...kernels.failures import KernelFailedError
from ..interception.switches import own_method
from ..snapshot import attributes

Form = TypeVar("Form")

_SCALARS = frozenset({bool, int, float, str, type(None)})
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_is_hf_initialized"} | SET_BY_ZERO
"""Attributes that are no settings."""

_OF_A_LAYER = frozenset({"layer_idx", "layer_id"})
"""Attributes that differ between layers, which compute the same unless their `forward` reads them."""

_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_WITH_CONTENTS = (Tensor, list, dict, set)

_on: ContextVar[bool] = ContextVar("hf_fastdecode_fused", default=False)
"""Whether replaced modules run their kernels, in this thread's pass."""

TRIED_IN = torch.bfloat16
"""Dtype of trials: its roundings tell the forms of a formula apart."""


class FusedKind(NamedTuple):
    """One kind of modules, such as norms, that kernels can compute."""

    what: str  # the name of such modules in reports; empty for those that run as no kernel
    may_be: Callable[[type[nn.Module]], bool]  # a quick look at a class, before each module of it is tried
    key: Callable[[nn.Module], Hashable | None]  # tells apart what computes differently; None for other parts
    form_of: Callable[[nn.Module], Any]  # the form of the known formula, by a trial; None if it is another one
    replacement: Callable[[nn.Module, Any], Any]  # what is called in place of a module's forward, with its arguments


def by_kernel(run: Callable[..., Any]) -> Callable[[nn.Module, Any], Any]:
    """Replacements of `FusedKind` by a kernel; where it does not serve a call or fails, the module's own code runs.

    Args:
        run: Called with the module, its form and what ``forward`` is given; None where the kernel does not serve that.
    """

    def call(module: nn.Module, form: Any, *args: Any, **kwargs: Any) -> Any:
        found = None
        if is_plain(module):
            try:  # noqa: SIM105 - called for each module: `suppress` takes several times as long
                found = run(module, form, *args, **kwargs)
            except (ValueError, KernelFailedError):  # ValueError: as of a weight that is not contiguous
                pass
        return uncompiled_call(module, *args, **kwargs) if found is None else found

    return lambda module, form: partial(call, module, form)


def by_copy(
    others: Callable[[Callable[..., Any], Any], Mapping[str, Callable[..., Any]]], serves: Callable[[Tensor], bool]
) -> Callable[[nn.Module, Any], Any]:
    """Replacements of `FusedKind` by a copy of ``forward``, in which names are `others`, see `calling`.

    Args:
        others: Given ``forward`` and the module's form.
        serves: Whether the copy runs for these hidden states, see `runs_fused`; otherwise the module's own code does.
    """

    def replacement(module: nn.Module, form: Any) -> Callable[..., Any]:
        forward = type(module).forward
        copied = calling(forward, others(forward, form))  # anew for each pass, as other names may be others by then
        assert copied is not None  # for `form_of` made one

        def call(*args: Any, **kwargs: Any) -> Any:
            hidden = args[0] if args else kwargs.get("hidden_states")
            if isinstance(hidden, Tensor) and serves(hidden) and is_plain(module):
                return copied(module, *args, **kwargs)
            return uncompiled_call(module, *args, **kwargs)

        return call

    return replacement


def random(*shape: int, seed: int, dtype: torch.dtype = TRIED_IN) -> Tensor:
    """Random numbers on the CPU, which leave the global generators as they are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(dtype)


random_fp32 = partial(random, dtype=torch.float32)


def linear(inputs: int, outputs: int, *, seed: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(random(outputs, inputs, seed=seed), requires_grad=False)
    return layer


def twin(module: nn.Module, **parts: nn.Module | Tensor) -> nn.Module:
    """A small module of the same class and settings, with these parts in the place of its own."""
    small: nn.Module = object.__new__(type(module))
    nn.Module.__init__(small)
    vars(small).update({name: value for name, value in attributes(module).items() if name not in vars(small)})
    small.training = module.training
    for name, part in parts.items():
        setattr(small, name, part if isinstance(part, nn.Module) else nn.Parameter(part, requires_grad=False))
    return small


def settings(module: Any) -> Hashable | None:
    """Class, that class's `forward` and attributes, by which a module computes; of a function, its key.

    None where attributes are tensors or collections, which may differ between modules that look alike.
    """
    if not isinstance(module, nn.Module):
        return function_key(module)
    read = names_in(type(module)) if not _OF_A_LAYER.isdisjoint(vars(module)) else ()
    found: list[Any] = [type(module), function_key(type(module).forward)]
    own = attributes(module)
    for name in _names_of_settings(tuple(own), read):
        value = own[name]
        kind = type(value)  # not `isinstance`, which asks a config for its `__class__`
        if kind in _SCALARS:
            found.append((name, value))
        elif issubclass(kind, _FUNCTIONS):
            found.append((name, function_key(value)))
        elif issubclass(kind, _WITH_CONTENTS):
            return None
    return tuple(found)


@lru_cache(maxsize=1024)
def _names_of_settings(names: tuple[str, ...], read: tuple[str, ...]) -> tuple[str, ...]:
    """The names of attributes that may be settings: a few, the same for most modules of a class."""
    others = _OF_EVERY_MODULE | (_OF_A_LAYER - set(read))
    return tuple(name for name in names if name not in others)


def function_key(function: Any) -> Hashable | None:
    """Tells functions apart without keeping them, and what they refer to, alive; None for other callables."""
    return ref(function) if isinstance(function, _FUNCTIONS) else None


def names_in(module: type[nn.Module]) -> tuple[str, ...]:
    """Global names and attributes that the `forward` of a class reads; () where it is no Python function."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code.co_names if code is not None else ()


def close(found: Any, expected: Tensor, *, rtol: float = 1e-3, atol: float = 1e-3) -> bool:
    """Whether a trial has found what is expected, but for roundings."""
    same = isinstance(found, Tensor) and (found.shape, found.dtype) == (expected.shape, expected.dtype)
    return same and torch.allclose(found, expected, rtol=rtol, atol=atol)


def matching(found: Tensor, expected: Iterable[tuple[Form, Tensor]]) -> Form | None:
    """The form with the elements found, of which one in a hundred may differ, from sums in another order."""
    for form, numbers in expected:
        same = found.shape == numbers.shape and found.dtype == numbers.dtype
        if same and bool((found != numbers).float().mean() <= 0.01) and torch.allclose(found, numbers, rtol=0.02):
            return form
    return None


def tried(trial: Any, *args: Any) -> Any:
    """The result of a trial, or None where the code cannot be run so."""
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            return trial(*args)
    except Exception:  # a model's own code, on inputs that are not its own
        return None


_WIDENED = frozenset(
    "acos arccos arcsin asin cdist cosh cosine_similarity cumprod cumsum dist erfinv exp expm1 group_norm layer_norm "
    "log log10 log1p log2 log_softmax logsumexp matrix_norm norm normalize pairwise_distance pow prod rdiv reciprocal "
    "renorm rms_norm rpow rsqrt sinh softmax softmin softplus square sum tan vector_norm".split()
)
"""Functions that autocast on CUDA widens from half precision to fp32, results too, or that call one of these."""

_NARROWED = frozenset(
    "addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d "
    "conv_transpose3d einsum linear matmul mm multi_dot mv prelu rmatmul scaled_dot_product_attention vecdot".split()
)
"""Functions that autocast computes in its own dtype, or that call one of these."""


class _Casts(TorchFunctionMode):
    """Context that notes in `seen` whether autocast would cast an operand of the code within."""

    seen = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = getattr(function, "__name__", "").strip("_").removeprefix("special_").removeprefix("linalg_")
        widened = name in _WIDENED and options.get("dtype") is None
        cast = TRIED_IN if widened else torch.float32 if name in _NARROWED else None
        self.seen |= any(isinstance(one, Tensor) and one.dtype == cast for one in (*args, *options.values()))
        return function(*args, **options)


_noting: ContextVar[_Casts | None] = ContextVar("hf_fastdecode_casts", default=None)


def form_and_casts(kind: FusedKind, module: nn.Module) -> tuple[Any, bool]:
    """The form of a module, see `FusedKind`, and whether autocast would change what `own_result` computed for it."""
    casts = _Casts()
    with setting(_noting, casts):
        return tried(kind.form_of, module), casts.seen


def own_result(small: nn.Module, *args: Any) -> Any:
    """What the `forward` of a small module's class returns, of operands in `TRIED_IN`."""
    with _noting.get() or nullcontext():
        return type(small).forward(small, *args)


def unless_cast(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a module, in which its own code runs under autocast."""

    def run(*args: Any, **kwargs: Any) -> Any:
        casts = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
        return uncompiled_call(module, *args, **kwargs) if casts else call(*args, **kwargs)

    return run


def global_named(name: str, forward: Callable[..., Any]) -> Any:
    """The value of a global name in the code of a function, below its decorators; None if there is no such name."""
    return inspect.unwrap(forward).__globals__.get(name)


def calling(forward: Any, others: Mapping[str, Callable[..., Any]]) -> Callable[..., Any] | None:
    """A copy of a function, and of its decorators, in which names are others; None if they cannot be copied."""
    if not isinstance(forward, FunctionType):
        return None
    names, cells, wrapped = forward.__globals__, forward.__closure__ or (), getattr(forward, "__wrapped__", None)
    if wrapped is None:
        names = {**names, **others}
    else:
        inner = calling(wrapped, others)
        held = [cell for cell in cells if contents(cell) is wrapped]
        if inner is None or not held:
            return None
        cells = tuple(CellType(inner) if cell in held else cell for cell in cells)
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, cells)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def contents(cell: CellType) -> Any:
    """What a cell of a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def fused_here() -> AbstractContextManager[None]:
    """Context in which replaced modules run their kernels; other threads, also of the same model, are unaffected."""
    return setting(_on, True)


class Returns(nn.Module):
    """A part of a tried module that returns a given result, and keeps the arguments of its last call."""

    def __init__(self, result: Any):
        super().__init__()
        self.result = result
        self.seen: tuple[Tensor, ...] = ()

    def forward(self, *args: Tensor) -> Any:
        self.seen = args
        return self.result


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is a call of its class's `forward`."""
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or "_hf_hook" in own or "_call_impl" in own:
        return False
    return "forward" not in own or own_method(module, "forward") is None


def runs_fused(x: Tensor, *, differentiable: bool = False) -> bool:
    """Whether kernels run in this thread's pass for such a tensor; for gradients, those that have some."""
    return (
        _on.get()
        and x.dtype in (torch.float16, torch.bfloat16)
        and 0 not in x.shape
        and (differentiable or not torch.is_grad_enabled())
        and type(x) is Tensor
    )
