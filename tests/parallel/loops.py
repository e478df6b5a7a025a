"""Decoding loops other than this package's: those of transformers on two GPUs, and one of the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import SharedContextCache

from .exactness import lost_by, lost_by_beams

Action = int | Callable[[PreTrainedModel, SharedContextCache], None]


def logits_of_loop(model: PreTrainedModel, ids: torch.Tensor, *actions: Action) -> list[torch.Tensor]:
    """The logits of each pass of a loop, after a prefill.

    Args:
        actions: Numbers of tokens of a pass, or what is done between passes.
    """

    def run(model: PreTrainedModel, input_ids: torch.Tensor, **arguments: Any) -> list[torch.Tensor]:
        generator, cache = torch.Generator().manual_seed(5), arguments[CACHE]
        model(input_ids, logits_to_keep=1, **{CACHE: cache})
        logits = []
        for action in actions:
            if callable(action):
                action(model, cache)
                continue
            fed = torch.randint(3, 90, (len(input_ids), action), generator=generator)
            logits.append(model(fed.to(input_ids.device), **{CACHE: cache}).logits)
        return logits

    found: list[torch.Tensor] = model.generate(ids, custom_generate=run, max_new_tokens=100)
    return found


def loops_on_gpu(model: PreTrainedModel, alone: PreTrainedModel, **options: Any) -> dict[str, Any]:
    """For each loop, whether captured results are right, and of a second call path, mode, its reason and captures.

    Tokens are to be the best within the errors of logits that are twice PyTorch's, and logits as exact as that.

    Args:
        model: A model whose every step has a clear winner, on this process's GPU.
        alone: One that this process computes by itself, which drafts tokens too.
        options: Of `enable`.
    """
    device = alone.device
    ids = torch.arange(300, device=device).remainder(61)[None] + 30
    rows, found = torch.cat([ids, ids]), dict[str, Any]()
    rows[1, -9:] += 7
    usual = {"do_sample": False, "max_new_tokens": 24}
    calls = {
        "beams": {"input_ids": rows, "attention_mask": torch.ones_like(rows), "num_beams": 3} | usual,
        "lookup": {"input_ids": ids, "prompt_lookup_num_tokens": 5} | usual,
        "drafts": {"input_ids": ids, "assistant_model": alone} | usual,
    }
    stock = model.generate(**calls["beams"])
    exact, plain = (logits_of_loop(one, rows, *_ACTIONS) for one in (copy.deepcopy(alone).double(), model))
    with fd.enabled(model, mode="graph", **options):
        for name, given in calls.items():
            first, tokens = model.generate(**given), model.generate(**given)
            call = fd.explain(model).last_call
            beams = name == "beams"
            lost, error = lost_by_beams(alone, tokens, stock, given) if beams else lost_by(alone, tokens, given)
            right = [torch.equal(first, tokens), lost <= 4 * error]
            found[name] = right, call.path, call.mode, call.mode_reason, call.captures
        logits = [logits_of_loop(model, rows, *_ACTIONS) for _ in range(2)]
        right, call = [all(map(_is_exact, one, plain, exact)) for one in logits], fd.explain(model).last_call
        found["the user's"] = right, call.path, call.mode, call.mode_reason, call.captures
    return found


def require_captured_loops(found: dict[str, Any]) -> None:
    """Require of what `loops_on_gpu` saw that all is right, and captured once."""
    assert len(found) == 4
    for name, one in found.items():
        assert one == [[True, True], "shared", "graph", "mode='graph' was requested", 0], name


def reorder(model: PreTrainedModel, cache: SharedContextCache) -> None:
    """The two rows of a batch change places."""
    cache.reorder_cache(torch.tensor([1, 0], device=model.device))


_ACTIONS: tuple[Action, ...] = (1, 4, 20, reorder, 1, reorder, 3, 1)


def _is_exact(found: torch.Tensor, stock: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether the error of logits is at most twice that of stock's."""
    return bool((found.double() - exact).norm() <= 2 * (stock.double() - exact).norm())


def close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether logits in fp32 are the same but for roundings."""
    return all(torch.allclose(*two, atol=1e-4, rtol=1e-4) for two in zip(found, expected, strict=True))
