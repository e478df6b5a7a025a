"""One forward and backward pass, as named tensors, and the bound that those of a shared pass keep.

The bound comes from stock's own rounding: the same pass in float64 throughout is taken as exact, and a shared pass may
be at most twice as far from it as stock's in float32, by the norm of each tensor. A few units in the last place are
added, since stock's rounding may vanish by chance: of the tensor's own norm, and, for gradients, of the norm of all
gradients together, because some are zero in exact arithmetic (that of a key's bias) and hold only what others round.
Rounding is a draw: of some hundred passes one is farther than that though all are alike on average. So where the first
comparison fails, medians of several draws are compared, of models whose weights are moved by some units in the last
place: rows in other orders are rounded alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

import hf_fastdecode as fd

from .batches import Batch

_TIMES_STOCK = 2.0
_DRAWS = 9
_MOVED = 1e-5
_UNITS = 4 * torch.finfo(torch.float32).eps
Outcome = Mapping[str, Tensor]
Compared = tuple[Outcome, Outcome, Outcome]
"""Outcomes of a shared pass, of stock's, and of stock's in float64."""
PADDING = "padding"
"""Name of what a pass gives for padding, which is not compared: stock's is arbitrary, a shared pass gives zeros."""


@contextmanager
def sharing(model: PreTrainedModel, **options: Any) -> Iterator[PreTrainedModel]:
    """Within, passes share whatever they can."""
    with fd.enabled(model, **{"min_saved_tokens": 1, "min_shared_tokens": 1} | options):
        yield model


def report_of(model: nn.Module) -> Any:
    """What the last forward pass did."""
    return fd.explain(model).last_forward


class InDoubles(TorchFunctionMode):
    """Within, what transformers computes in float32 whatever the model's dtype is computed in float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        args, kwargs = tree_map(lambda one: torch.float64 if one is torch.float32 else one, (args, kwargs or {}))
        return function(*args, **kwargs)


def exact(model: PreTrainedModel, run: Callable[[PreTrainedModel], Outcome]) -> Outcome:
    """What `run` gives for the model in float64."""
    return exact_of(in_doubles(copy.deepcopy(model)), run)


def checkpoint(model: PreTrainedModel, *, use_reentrant: bool) -> None:
    """Let a model compute its layers again for gradients."""
    newer = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23 on
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


def in_doubles(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself in float64.

    Without grouped products of experts, which PyTorch does not have of float64, and without checkpoints, which compute
    layers again outside `InDoubles`.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False
    model.set_experts_implementation("eager")
    return model.double()


def exact_of(doubles: PreTrainedModel, run: Callable[[PreTrainedModel], Outcome]) -> Outcome:
    """The same of a model that is in float64 already."""
    with InDoubles():
        return run(doubles)


def outcome(model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
    """Logits, loss and hidden states of real tokens, and gradients; and what the pass gives for padding."""
    with nullcontext() if batch.gradient else torch.no_grad():
        output = model(**batch.arguments(model.get_input_embeddings()))
        logits, states = output.logits, output.hidden_states or ()
        real = batch.real[:, batch.kept]
        found = {"logits": logits[real]} | {f"hidden {at}": layer[batch.real] for at, layer in enumerate(states)}
        if batch.labels:
            found["loss"] = output.loss
        # Zero times a logit is a number where the logit is: heads may add a bias.
        padding = [0 * logits[~real], *(layer[~batch.real] for layer in states)]
    if batch.gradient:
        found = {name: value.detach() for name, value in found.items()} | gradients(model, projection(found))
    return found | {PADDING: torch.cat([one.detach().flatten() for one in padding])}


def projection(found: Outcome) -> Tensor:
    """A number whose gradient reaches every entry, each by another weight, the same in both dtypes."""
    generator = torch.Generator().manual_seed(0)
    total: Any = 0
    for name, value in found.items():
        if value.requires_grad:
            weights = torch.randn(value.shape, generator=generator) / max(value.numel(), 1) ** 0.5
            total = total + (value if name == "loss" else (value * weights.to(value.dtype)).sum())
    return total


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of all parameters that have one."""
    model.zero_grad()
    loss.backward()
    found = {f"gradient of {name}": one.grad for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    return found


def faults(ours: Outcome, stock: Outcome, oracle: Outcome) -> list[str]:
    """Tensors that are farther from the oracle than the bound, with both numbers, and those that only one pass has."""
    return typical_faults([(ours, stock, oracle)])


def typical_faults(draws: Sequence[Compared]) -> list[str]:
    """Faults of several draws: the median of errors beside that of bounds."""
    first, stock, _ = draws[0]
    names = stock.keys() - {PADDING}
    found = [f"{name}: in one of both only" for name in names ^ (first.keys() - {PADDING})]
    for name in names & first.keys():
        if first[name].shape != stock[name].shape:
            found.append(f"{name}: {[*first[name].shape]}, not {[*stock[name].shape]}")
            continue
        error, bound, size = (
            median(numbers) for numbers in zip(*(_error(name, *draw) for draw in draws), strict=True)
        )
        if not error <= bound:
            found.append(f"{name}: error {error:.2e}, at most {bound:.2e} of {size:.2e}")
    return sorted(found)


def _error(name: str, ours: Outcome, stock: Outcome, oracle: Outcome) -> tuple[float, float, float]:
    """The error of one tensor, the most that it may be, and the norm of which that may have some units."""
    error, rounding = (float((one[name].double() - oracle[name]).norm()) for one in (ours, stock))
    size = float(oracle[name].norm())
    if name.startswith("gradient"):
        size += sum(float(value.norm()) ** 2 for key, value in oracle.items() if key.startswith("gradient")) ** 0.5
    return error, _TIMES_STOCK * rounding + _UNITS * size, size


def moved(model: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, PreTrainedModel]]:
    """Copies of the model whose weights are moved a little, each also in float64: draws of other roundings."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(_DRAWS):
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(1 + _MOVED * torch.randn(parameter.shape, generator=generator))
        yield copied, in_doubles(copy.deepcopy(copied))


def relative_error(ours: Outcome, stock: Outcome, oracle: Outcome, kind: str) -> float:
    """Distance from the oracle, in stock's, over all tensors whose names begin so; 1 where stock has none."""
    names = [name for name in oracle if name.startswith(kind)]
    error, rounding = (
        sum(float((one[name].double() - oracle[name]).norm()) ** 2 for name in names) ** 0.5 for one in (ours, stock)
    )
    return error / rounding if rounding else 1.0


def compared(
    model: PreTrainedModel, run: Callable[[PreTrainedModel], Outcome], **options: Any
) -> tuple[list[str], Any]:
    """Faults of a shared pass beside stock's, and its report."""
    stock, oracle = run(model), exact(model, run)
    with sharing(model, **options):
        ours, report = run(model), report_of(model)
    return faults(ours, stock, oracle), report
