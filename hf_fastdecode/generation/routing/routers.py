"""How a router chooses experts: what it chose is read, or it is told what to choose.

A router computes scores of experts ``[tokens, experts]`` and takes the largest of each row by `torch.topk`. The scores
that this returns, or those at the places that it returns, become the weights of the experts. So a router whose
`torch.topk` returns given places computes weights of given experts by its own code: from its current logits, to which
gradients flow, as in rollout routing replay (R3, Ma et al. 2025, arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._compat import COMPILED_CALL, setting, uncompiled_call
from ...instance_methods import Change, Switch
from ..fused.experts import ROUTERS


def routers_of(model: nn.Module) -> list[nn.Module]:
    """The routers of a model, in the order of its layers; raises ValueError if not each layer of experts has one."""
    every = list(model.modules())
    routers = [one for one in every if ROUTERS.may_be(type(one)) and one._parameters.get("weight") is not None]
    layers = sum(hasattr(one, "_apply_gate") for one in every)  # of experts that run by transformers' interface
    if not routers or layers not in (0, len(routers)):
        name, otherwise = type(model).__name__, "leave out output_router_choices and replay_routing"
        named = (f"{path} {type(one).__name__}" for path, one in model.named_modules())
        if not (routers or layers or any("expert" in one.lower() for one in named)):
            raise ValueError(f"{name} has no experts: {otherwise}")
        raise ValueError(
            f"{name} has experts, but {len(routers)} supported routers (modules with a weight that choose by "
            f"torch.topk) for {layers or 'its'} layers of them; others, as those that drop tokens beyond a capacity, "
            f"and copies, as of PEFT's modules_to_save, are not recorded or replayed: {otherwise}"
        )
    return routers


Visitor: TypeAlias = Callable[[int, Callable[[], Any]], Any]
"""Given a layer of experts, and what computes its router's output, returns that output."""

visitor_of_thread: ContextVar[Visitor | None] = ContextVar("hf_fastdecode_visitor_of_routers", default=None)

_calls = Switch(replaces=True)


@contextmanager
def visiting(routers: Sequence[nn.Module], visitor: Visitor) -> Iterator[None]:
    """Context in which this thread's calls of these routers, or of kernels in their places, go through a visitor."""
    changes = []
    for layer, router in enumerate(routers):
        before = vars(router).get(COMPILED_CALL) or partial(uncompiled_call, router)
        if isinstance(before, partial) and before.func is _call:  # of another thread's pass, which may end before
            before = before.args[1]
        changes.append(Change(router, COMPILED_CALL, partial(_call, layer, before)))
    with _calls.on(changes), setting(visitor_of_thread, visitor):
        yield


def _call(layer: int, before: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run = partial(before, *args, **kwargs)
    if (visitor := visitor_of_thread.get()) is None:
        return run()
    with setting(visitor_of_thread, None):  # `before` may lead here again
        return visitor(layer, run)


def _read(output: Any) -> tuple[Tensor, int]:
    """The experts ``[tokens, experts_per_token]`` that a router's output names, and how many there are."""
    parts = [one for one in output if isinstance(one, Tensor)]
    (chosen,) = (one for one in parts if not one.is_floating_point())
    return chosen, max(one.shape[-1] for one in parts)


class Collected:
    """A visitor that keeps what routers choose; `experts` is how many each layer has."""

    def __init__(self, routers: Sequence[nn.Module]):
        self._count, self.experts = len(routers), (0,) * len(routers)
        self._found: dict[int, tuple[Tensor, int]] = {}

    def __call__(self, layer: int, run: Callable[[], Any]) -> Any:
        output = run()
        self._found[layer] = _read(output)
        return output

    def of_layers(self) -> Tensor:
        """The experts of each token ``[tokens, layers, experts_per_token]``, in the smallest dtype that holds them."""
        chosen = [self._found[layer][0] for layer in sorted(self._found)]
        if len(chosen) < self._count or len({one.shape for one in chosen}) > 1:
            raise ValueError(
                f"{len(chosen)} of {self._count} routers were seen, or they choose unlike numbers of experts; compile "
                "no passes (disable_compile=True), or leave out output_router_choices"
            )
        self.experts = tuple(self._found[layer][1] for layer in range(self._count))
        dtype = torch.uint8 if max(self.experts) <= 256 else torch.int16
        return torch.stack([one.to(chosen[0].device, dtype) for one in chosen], dim=1)


class Replayed:
    """A visitor by which routers choose what is `stored`, as in `RouterChoices`, of `experts` of each layer.

    Args:
        tokens: ``[tokens]`` int64: for each token of the pass, where its choices are stored; -1 for its own.
    """

    def __init__(self, stored: Tensor, experts: Sequence[int], tokens: Tensor):
        self._stored, self._experts = stored, experts
        self._at, known = tokens.clamp(min=0).to(stored.device), (tokens >= 0)[:, None]
        self._known = None if bool(known.all()) else known.to(stored.device)
        self.seen: set[int] = set()

    def __call__(self, layer: int, run: Callable[[], Any]) -> Any:
        self.seen.add(layer)
        with _Choosing(self._stored[self._at, layer], self._known, self._experts[layer]) as choosing:
            output = run()
        chosen, experts = _read(output)
        if chosen is not choosing.chosen or experts != self._experts[layer]:
            given = f"{self._stored.shape[2]} of {self._experts[layer]} for {len(self._at)}"
            raise ValueError(
                f"router {layer} chooses {chosen.shape[1]} of {experts} experts for {len(chosen)} tokens, "
                f"and was given {given}, or has no topk that can be replaced; replay choices of the same model"
            )
        return output


class _Choosing(TorchFunctionMode):
    """Context of one router, in which `torch.topk` of scores returns given places, or their groups, and the scores."""

    def __init__(self, given: Tensor, known: Tensor | None, experts: int):
        super().__init__()
        self._given, self._known, self._experts = given, known, experts
        self.chosen: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        choose = self._topk if function in (torch.topk, Tensor.topk) else partial(function)
        return choose(*args, **(kwargs or {}))

    def _topk(self, input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        columns, experts = input.shape[-1], self._experts
        alike = len(self._given) == len(input) and (columns < experts or k == self._given.shape[1])
        if input.dim() != 2 or dim not in (1, -1) or experts % columns or not alike:
            return torch.topk(input, k, dim, **options)
        chosen = self._given.to(input.device, torch.int64)
        if columns < experts:
            groups = torch.zeros(input.shape, device=input.device)
            chosen = groups.scatter_(1, chosen // (experts // columns), 1.0).topk(k)[1]
        if self._known is not None:
            chosen = torch.where(self._known.to(input.device), chosen, torch.topk(input, k, dim, **options)[1])
        self.chosen = chosen
        return torch.return_types.topk((input.gather(1, chosen), chosen))
