"""How a router chooses experts: what it chose is read, or it is told what to choose.

A router is a module whose ``forward`` computes scores of experts ``[tokens, experts]``, takes the largest of each row
by `torch.topk`, and returns its logits first and the chosen experts last. Between, it computes their weights from the
scores that `torch.topk` returned, or at the places that it returned. So a router whose `torch.topk` returns given
places, and the scores at these, computes weights of given experts by its own code: from its logits of now, to which
gradients flow, as in rollout routing replay (R3, Ma et al. 2025, arXiv 2510.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._compat import COMPILED_CALL, setting, uncompiled_call
from ...instance_methods import Change, Switch
from ..fused.experts import ROUTERS

_EXPERTS = "_apply_gate"
"""Method of modules whose experts run by transformers' interface."""


def routers_of(modules: Iterable[nn.Module], name: str) -> list[nn.Module]:
    """The routers among a model's modules, one for each layer of experts, in the layers' order.

    Args:
        name: The model's, for errors.

    Raises:
        ValueError: There are none, or not one for each layer of experts.
    """
    every = list(modules)
    routers = [one for one in every if ROUTERS.may_be(type(one)) and isinstance(one._parameters.get("weight"), Tensor)]
    layers = sum(hasattr(one, _EXPERTS) for one in every)
    if not routers or len(routers) < layers:
        raise ValueError(
            f"{name} has {len(routers)} routers that take the largest of their scores by torch.topk, and {layers} "
            "layers of experts; choices of other routers, as of those that drop tokens beyond a capacity, are not "
            "recorded or replayed: call generate without output_router_choices, and train without replay_routing"
        )
    return routers


class Visitor(Protocol):
    """What is done around the calls of routers in a pass."""

    def visit(self, layer: int, run: Callable[[], Any]) -> Any:
        """The output of the router of this layer of experts, which `run` computes."""
        ...


visitor_of_thread: ContextVar[Visitor | None] = ContextVar("hf_fastdecode_visitor_of_routers", default=None)

_calls = Switch(replaces=True)


class _Call:
    """The call of a router in the place of its own, which was `before`: a kernel, or the module's code."""

    def __init__(self, layer: int, router: nn.Module):
        now = vars(router).get(COMPILED_CALL)
        self._layer = layer
        self.before: Callable[..., Any] = (
            now.before if isinstance(now, _Call) else now or partial(uncompiled_call, router)
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = partial(self.before, *args, **kwargs)
        return run() if (visitor := visitor_of_thread.get()) is None else visitor.visit(self._layer, run)


@contextmanager
def visiting(routers: Sequence[nn.Module], visitor: Visitor) -> Iterator[None]:
    """Context in which this thread's calls of these routers go through a visitor."""
    changes = [Change(router, COMPILED_CALL, _Call(layer, router)) for layer, router in enumerate(routers)]
    with _calls.on(changes), setting(visitor_of_thread, visitor):
        yield


class Collected:
    """A visitor that keeps what routers chose."""

    def __init__(self) -> None:
        self._chosen: dict[int, Tensor] = {}
        self.experts: tuple[int, ...] = ()

    def visit(self, layer: int, run: Callable[[], Any]) -> Any:
        output = run()
        self._chosen[layer] = output[-1].detach()
        self.experts = (*self.experts[:layer], output[0].shape[-1], *self.experts[layer + 1 :])
        return output

    def of_layers(self, count: int) -> Tensor:
        """The experts of each token ``[tokens, layers, experts_per_token]``, in the smallest dtype that holds them."""
        if len(self._chosen) != count or len({one.shape for one in self._chosen.values()}) != 1:
            shapes = [tuple(one.shape) for one in self._chosen.values()]
            raise ValueError(
                f"routers of {count} layers are to choose as many experts, and {len(shapes)} were seen, with choices "
                f"of shapes {sorted(set(shapes))}; compiled passes show none (disable_compile=True)"
            )
        dtype, device = dtype_of(max(self.experts)), self._chosen[0].device
        return torch.stack([self._chosen[layer].to(device, dtype) for layer in range(count)], dim=1)


@contextmanager
def collecting(routers: Sequence[nn.Module]) -> Iterator[Collected]:
    """Context of one pass, of which it collects what these routers choose."""
    collected = Collected()
    with visiting(routers, collected):
        yield collected


def dtype_of(experts: int) -> torch.dtype:
    """The smallest dtype for numbers of experts: one byte up to 256, two up to 32,768."""
    return torch.uint8 if experts <= 256 else torch.int16 if experts <= 2**15 else torch.int32


class Replayed:
    """A visitor by which routers choose what is given.

    Args:
        stored: ``[stored, layers, experts_per_token]`` of integers.
        experts: How many each layer has.
        tokens: ``[tokens]`` int64 on the CPU: for each token of the pass, which of the stored choices it gets; -1 for
            the router's own.
    """

    def __init__(self, stored: Tensor, experts: Sequence[int], tokens: Tensor):
        self._stored, self._experts, self._tokens = stored, experts, tokens
        self._all_known = bool((tokens >= 0).all())
        self._at = {torch.device("cpu"): tokens}
        self.seen: set[int] = set()

    def visit(self, layer: int, run: Callable[[], Any]) -> Any:
        self.seen.add(layer)
        with _Choosing(partial(self._given, layer), self._experts[layer]) as choosing:
            output = run()
        if choosing.chosen is None or output[-1] is not choosing.chosen or output[0].shape[-1] != self._experts[layer]:
            raise ValueError(
                f"the router of layer {layer} of experts chose by other code than one torch.topk of its "
                f"{self._experts[layer]} scores, or has {output[0].shape[-1]} experts; use choices of the same model"
            )
        return output

    def _given(self, layer: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The given choices ``[tokens, experts_per_token]`` int64, and which of them count; None for all."""
        at = self._tokens_on(self._stored.device)
        chosen = self._stored[at.clamp(min=0), layer].to(device, torch.int64)
        return chosen, None if self._all_known else self._tokens_on(device)[:, None] >= 0

    def _tokens_on(self, device: torch.device) -> Tensor:
        if device not in self._at:
            self._at[device] = self._tokens.to(device)
        return self._at[device]


class _Choosing(TorchFunctionMode):
    """Context of one router, in which this thread's `torch.topk` of scores returns given places.

    Where a router first takes the best groups of experts, those of the given experts are among them: others would hide
    their scores.
    """

    def __init__(self, given: Callable[[torch.device], tuple[Tensor, Tensor | None]], experts: int):
        super().__init__()
        self._given, self._experts = given, experts
        self.chosen: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.topk, Tensor.topk):
            return self._topk(function, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _topk(self, function: Any, input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        columns = input.shape[-1]
        if input.dim() != 2 or dim not in (1, -1) or self._experts % columns:
            return function(input, k, dim, **options)
        chosen, known = self._given(input.device)
        if len(chosen) != len(input) or (columns == self._experts and k != chosen.shape[1]):
            raise ValueError(
                f"a router chooses {k} experts for each of {len(input)} tokens, and the choices to replay are "
                f"{chosen.shape[1]} for each of {len(chosen)}; replay choices of the same model and rows"
            )
        if columns < self._experts:
            groups = torch.zeros(input.shape, device=input.device)
            chosen = groups.scatter_(1, chosen // (self._experts // columns), 1.0).topk(k)[1]
        if known is not None:
            chosen = torch.where(known, chosen, function(input, k, dim, **options)[1])
        if columns == self._experts:
            self.chosen = chosen
        return torch.return_types.topk((input.gather(1, chosen), chosen))
