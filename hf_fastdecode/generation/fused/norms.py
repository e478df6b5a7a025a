"""RMSNorm modules, also with a gate or after a sum, in one launch each.

Between a layer's products a model adds its input, by an operator, and hands the sum to its next norm. `WaitingSums`
leaves such a sum undone until the next operation, and before it the sum over a row's experts: a norm that runs as a
kernel takes them along, any other operation first has them computed. Norms with a gate follow the states of gated
delta nets and Mamba-2.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...kernels.experts import reference as experts_reference
from ...kernels.experts.api import ExpertSums, Norm
from ...kernels.failures import KernelFailedError
from ...kernels.pointwise import reference
from ...kernels.pointwise.api import MOST_COLUMNS, GatedNormForm, NormForm, Plus, gated_rms_norm
from ...kernels.pointwise.gradients import rms_norm
from .head_norms import waiting_head_norms
from .trial import TRIED_IN, FusedKind, by_kernel, matching, own_result, random, runs_fused, settings, twin

_EPS = ("variance_epsilon", "eps")
_COLUMNS = 96

_SCALES = torch.tensor([1, 0.1, 0.01, 0.001] * 2, dtype=TRIED_IN, device="cpu")[:, None]
"""Scales of rows: small ones show where an epsilon is added."""


def may_be(module: type[nn.Module]) -> bool:
    return "norm" in module.__name__.lower()


def key(module: nn.Module) -> Hashable | None:
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len(module._parameters) > 1 or module._modules or module._buffers:
        return None
    of_module = settings(module) if eps_of(module) is not None else None
    return (of_module, weight.dtype == torch.float32) if of_module is not None else None


def form_of(module: nn.Module) -> NormForm | None:
    eps, own = eps_of(module), module._parameters["weight"]
    assert eps is not None
    assert own is not None
    x = random(8, _COLUMNS, seed=1) * _SCALES
    weight = random(_COLUMNS, seed=2, dtype=torch.float32 if own.dtype == torch.float32 else TRIED_IN)
    found = own_result(twin(module, weight=weight), x)
    return matching(found, ((form, reference.rms_norm(x, weight, eps, form)) for form in NormForm))


def _run(module: nn.Module, form: NormForm, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    sums, weight, eps = waiting_sums(), module._parameters.get("weight"), eps_of(module)
    waits = sums is not None and sums.waits(x)
    # Of queries and keys of many tokens, which models transpose first: [batch, heads, length, head_dim]. A sum that
    # waits would be computed by looking at it.
    transposed = not waits and x.dim() == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()
    if (
        args
        or kwargs
        or type(weight) is not nn.Parameter
        or eps is None
        or not runs_fused(x, differentiable=True)
        or not (waits or transposed or x.is_contiguous())
        or weight.shape != x.shape[-1:]
        or weight.device != x.device
        or weight.shape[0] > MOST_COLUMNS
        or (form is NormForm.ROUNDED and weight.dtype != x.dtype)
    ):
        return None
    if sums is not None and waits:
        with sums.taken() as (first, plus, of_experts):
            if of_experts is not None:
                return of_experts.added_up(Norm(plus, weight, eps, form))
            return rms_norm(first, weight, eps=eps, form=form, plus=plus)
    heads = waiting_head_norms() if x.dim() == 4 and not torch.is_grad_enabled() else None
    if heads is not None:
        return heads.wait(x, weight, eps, form)
    found = rms_norm(x.transpose(1, 2) if transposed else x, weight, eps=eps, form=form)
    return found.transpose(1, 2) if transposed else found


def eps_of(module: nn.Module) -> float | None:
    own = vars(module)
    for name in _EPS:
        if isinstance(eps := own.get(name), float):
            return eps
    return None


_GROUP = "group_size"
"""Attribute with the number of elements in a group."""


def _gated_may_be(module: type[nn.Module]) -> bool:
    return may_be(module) and "gated" in module.__name__.lower()


def _gated_key(module: nn.Module) -> Hashable | None:
    found = key(module)
    return None if found is None else ("gated norms", found)


def _gated_form_of(module: nn.Module) -> GatedNormForm | None:
    eps, group = eps_of(module), vars(module).get(_GROUP)
    assert eps is not None
    columns = 2 * group if group else _COLUMNS
    x, gate, weight = random(5, columns, seed=0), random(5, columns, seed=1), random(columns, seed=2)
    found, given = own_result(twin(module, weight=weight), x, gate), (x, gate, weight, eps)
    return matching(found, ((form, reference.gated_rms_norm(*given, form, group=group)) for form in GatedNormForm))


def _run_gated(module: nn.Module, form: GatedNormForm, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
    weight, eps, gate = module._parameters.get("weight"), eps_of(module), args[0] if args else kwargs.get("gate")
    if len(args) + len(kwargs) != 1 or type(gate) is not Tensor or type(weight) is not nn.Parameter or eps is None:
        return None
    known = x.dtype in (gate.dtype, torch.float32) and gate.device == weight.device == x.device
    if not known or not runs_fused(gate):
        return None
    weights = weight.float() if x.dtype == torch.float32 else weight  # fp32 as scans of several tokens give it
    return gated_rms_norm(x, gate, weights, eps, form, group=vars(module).get(_GROUP))


NORMS = FusedKind("norms", may_be, key, form_of, by_kernel(_run))
GATED_NORMS = FusedKind("gated norms", _gated_may_be, _gated_key, _gated_form_of, by_kernel(_run_gated))


_SUMS = (torch.add, Tensor.add, Tensor.__add__)
_HALF = (torch.float16, torch.bfloat16)
_METADATA = frozenset(
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")
)
"""Reads of attributes that do not lead to a tensor's memory."""
_VIEWS = (Tensor.view, Tensor.view_as, Tensor.reshape)


class WaitingSums(TorchFunctionMode):
    """Context in which this thread's sums wait. Of several function modes it must be entered last.

    A function mode sees every operation on tensors and every read of their attributes, so that none reads memory
    that is not written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._terms: tuple[Tensor, Tensor] | None = None
        self._total: Tensor | None = None
        self._of_experts: ExpertSums | None = None

    def __enter__(self) -> Any:
        self._token = _active.set(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.reset(self._token)
        self.compute()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _METADATA:
            return function(*args, **(kwargs or {}))
        sums = self._of_experts if self._terms is None else None
        if sums is not None and function in _VIEWS and args[0] is sums.out:
            view: Tensor = function(*args, **(kwargs or {}))
            if view.shape[-1] == sums.out.shape[-1]:
                self._of_experts = sums._replace(out=view)
            else:
                self.compute()
            return view
        adds = function in _SUMS and not kwargs and len(args) == 2 and _can_wait(*args)
        if not (adds and sums is not None and (args[0] is sums.out) != (args[1] is sums.out)):
            self.compute()
        if adds:
            self._terms, self._total = args, torch.empty_like(args[0])
            return self._total
        return function(*args, **(kwargs or {}))

    def leave(self, sums: ExpertSums) -> Tensor:
        """Let sums of experts wait, which are returned."""
        self.compute()
        self._of_experts = sums
        return sums.out

    def compute(self) -> None:
        """Compute the sums that wait, if any."""
        terms, total, sums = self._taken()
        if sums is not None:
            try:
                sums.added_up()
            except KernelFailedError:
                sums.out.copy_(experts_reference.added_up(*sums[:4]).view_as(sums.out))
        if terms is not None:
            torch.add(*terms, out=total)

    def _taken(self) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None, ExpertSums | None]:
        found = self._terms, self._total, self._of_experts
        self._terms = self._total = self._of_experts = None
        return found

    def waits(self, total: Tensor) -> bool:
        """Whether this is the sum that waits."""
        return self._terms is not None and total is self._total

    @contextmanager
    def taken(self) -> Iterator[tuple[Tensor, Plus, ExpertSums | None]]:
        """Context that yields the sum that waits to who computes it; computed here if that fails.

        If one of its terms waits too, the other is the addend.
        """
        terms, total, sums = found = self._taken()
        assert terms is not None
        assert total is not None
        first, second = terms if sums is None or terms[0] is sums.out else terms[::-1]
        try:
            yield first, Plus(second, total), sums
        except BaseException:
            self._terms, self._total, self._of_experts = found
            self.compute()
            raise


# Of this thread's pass.
_active: ContextVar[WaitingSums | None] = ContextVar("hf_fastdecode_sums", default=None)


def waiting_sums() -> WaitingSums | None:
    """The context of this thread, if any."""
    return _active.get()


def sum_of_experts(sums: ExpertSums) -> Tensor:
    """Sums of experts, which wait where sums do."""
    waiting = waiting_sums()
    return sums.added_up() if waiting is None else waiting.leave(sums)


def _can_wait(first: Any, second: Any) -> bool:
    """Whether these are plain tensors that a norm's kernel adds."""
    return (
        type(first) is type(second) is Tensor
        and first.shape == second.shape
        and first.dtype == second.dtype
        and first.dtype in _HALF
        and first.is_contiguous()
        and second.is_contiguous()
        and first.device == second.device
        and not torch.is_grad_enabled()
    )
