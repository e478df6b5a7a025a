"""Modules of dense decoders whose sums have a fixed order: linear layers, norms, and what is elementwise.

With ``log_probs="invariant"`` these, and `attention.in_order`, compute all passes of a model: prefill, steps, and
passes without a cache, with gradients too. A token then has the same bits in all of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..._compat import COMPILED_CALL, global_forward_hooks, uncompiled_call
from ...attention.in_order import in_order, is_in_order
from ...attention.overrides import cast, no_autocast
from ...errors import Unsupported
from ...instance_methods import is_linear
from ...kernels.invariant.api import aligned, linear, refusal
from ...kernels.pointwise.api import MOST_COLUMNS, NormForm
from ...kernels.pointwise.gradients import rms_norm
from ..interception.switches import replaced_calls
from .gated import GATED
from .modules import Found, FusedModules
from .norms import NORMS, eps_of, may_be
from .rotary import ROTARY
from .trial import FusedKind, is_plain


def _product(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not is_in_order():  # another thread's pass
        found: Tensor = uncompiled_call(module, x, *args, **kwargs)
        return found
    if args or kwargs or not is_linear(module):
        raise Unsupported("a linear layer has got a hook, or code of its own")
    given = [cast(part) for part in (x, module.weight, module.bias) if part is not None]
    with no_autocast(x.device):
        product: Tensor = linear(*given)
    return product


def _key_of_linear(module: nn.Module) -> Hashable | None:
    return "linear" if is_linear(module) else None


LINEARS = FusedKind(
    "linear layers",
    lambda kind: kind is nn.Linear,
    _key_of_linear,
    lambda module: True,
    lambda module, form: partial(_product, module),
)


def _normalized(module: nn.Module, form: NormForm, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if not is_in_order():
        found: Tensor = uncompiled_call(module, x, *args, **kwargs)
        return found
    weight, eps = module._parameters["weight"], eps_of(module)
    if args or kwargs or weight is None or eps is None or x.shape[-1] > MOST_COLUMNS:
        raise Unsupported(f"{type(module).__name__} is called otherwise than a norm, or has too many columns")
    if form is NormForm.ROUNDED:
        dtype = torch.promote_types(x.dtype, weight.dtype)  # that of PyTorch's result
        x, weight = x.to(dtype), weight.to(dtype)  # type: ignore[assignment]
    normalized: Tensor = rms_norm(aligned(x), aligned(weight), eps=eps, form=form)
    return normalized


NORMS_IN_ORDER = NORMS._replace(replacement=lambda module, form: partial(_normalized, module, form))


class InvariantModules(FusedModules):
    """Modules of a dense decoder, all of which compute in a fixed order.

    Raises:
        Unsupported: A module with parameters is neither an embedding nor any of them.
    """

    kinds = LINEARS, NORMS_IN_ORDER, GATED, ROTARY

    def __init__(
        self, model: nn.Module, modules: Iterable[nn.Module] | None = None, found: Sequence[Found] | None = None
    ):
        super().__init__(model, modules, found)
        if found is None:
            numbers = {one.number for one in self.found}
            for number, module in enumerate(self._every):
                name = type(module).__name__
                sums = module._parameters or may_be(type(module))  # norms may have no weights
                served = number in numbers or not sums or isinstance(module, nn.Embedding)
                if replaced_calls.otherwise(module, COMPILED_CALL) is not None or not (served or is_plain(module)):
                    raise Unsupported(f"{name} has a hook, or code of its own")
                if not served:
                    raise Unsupported(f"{name} does not compute in a fixed order of sums")

    @classmethod
    def left_out(cls, model: Any, *, gathers: bool) -> bool:
        reason = refusal(model.device)
        if model.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reason = f"its kernels compute in fp32, fp16 and bf16, got {model.dtype}"
        elif gathers:
            reason = "its parameters are gathered module by module"
        elif torch.backends.cuda.matmul.fp32_precision == "tf32":  # of angles, and of no more
            reason = "PyTorch multiplies fp32 in TF32; set torch.backends.cuda.matmul.fp32_precision to 'ieee'"
        if reason is not None:
            raise Unsupported(reason)
        return False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which this thread's passes compute in a fixed order."""
        if next(global_forward_hooks(), None) is not None:
            raise Unsupported("all modules have a hook")
        with super().installed(), in_order():
            yield
