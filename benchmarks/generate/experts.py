"""Experts that steps read: how many of a layer the rows of a call choose, and the bytes of these and other weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_fastdecode._compat import CACHE

_AT_ONCE = 8  # rows, each of which has keys and values of the whole prompt here
_WEIGHT = "gate_up_proj"


def mixtures_of(model: nn.Module) -> list[Any]:
    """The modules of experts, which are called with rows, the experts of each, and their shares."""
    found = [module for module in model.modules() if isinstance(getattr(module, _WEIGHT, None), nn.Parameter)]
    return [module for module in found if getattr(module, _WEIGHT).dim() == 3]


@torch.no_grad()
def experts_of_steps(model: PreTrainedModel, prompts: Tensor, drawn: Tensor) -> Tensor:
    """Experts that at least one row chooses, by layer and step: ``[layers, tokens - 1]`` int64.

    They are found in passes over tokens that were drawn before: none of a step's own code is in the way. Rounding
    differs from a step's, which chooses another expert now and then.

    Args:
        prompts: ``[prompts, context]`` int64, without padding.
        drawn: ``[rows, tokens]`` int64, the rows of a prompt in turn; their last tokens run through no layer.
    """
    mixtures, per_prompt = mixtures_of(model), len(drawn) // len(prompts)
    counts = [len(getattr(module, _WEIGHT)) for module in mixtures]
    seen = [torch.zeros(drawn.shape[1] - 1, count, dtype=torch.bool, device=drawn.device) for count in counts]
    for number, prompt in enumerate(prompts):
        cache = model(prompt[None], use_cache=True, logits_to_keep=1)[CACHE]
        rows = drawn[number * per_prompt : (number + 1) * per_prompt, :-1]
        for some in rows.split(_AT_ONCE):
            own = deepcopy(cache)
            own.batch_repeat_interleave(len(some))
            with _chosen(mixtures) as chosen:
                model(some, logits_to_keep=1, **{CACHE: own})
            for layer, experts in zip(seen, chosen, strict=True):
                layer.scatter_(1, experts.view(*some.shape, -1).transpose(0, 1).flatten(1).long(), value=True)
    return torch.stack([layer.sum(1) for layer in seen])


def read_bytes(model: PreTrainedModel, counts: Tensor) -> float:
    """Bytes of the chosen experts, the mean of the steps, and of all other weights but an embedding's rows, once.

    Args:
        counts: ``[layers, steps]``, see `experts_of_steps`.
    """
    mixtures = mixtures_of(model)
    of_experts = [sum(one.nbytes for one in module.parameters()) for module in mixtures]
    rest = sum(one.nbytes for one in model.parameters()) - sum(of_experts)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        rest -= embedding.weight.nbytes
    sizes = zip(of_experts, mixtures, counts.double().mean(1).tolist(), strict=True)
    return rest + sum(size * count / len(getattr(module, _WEIGHT)) for size, module, count in sizes)


@contextmanager
def _chosen(mixtures: list[Any]) -> Iterator[list[Tensor]]:
    """A list of what the layers' rows choose, in the order in which the layers run."""
    found: list[Tensor] = []
    with ExitStack() as hooks:
        for module in mixtures:
            handle = module.register_forward_pre_hook(lambda _, args: found.append(args[1]))
            hooks.callback(handle.remove)
        yield found
