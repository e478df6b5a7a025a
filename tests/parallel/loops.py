"""Decoding loops other than this package's, and errors of tokens and logits in half precision against fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import SharedContextCache


def clear_model(**sizes: Any) -> PreTrainedModel:
    """A model whose every step has a clear winner, for its head is its embedding: tokens of all ways are the same."""
    torch.manual_seed(0)
    usual = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    usual |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096}
    config = LlamaConfig(**usual | sizes, tie_word_embeddings=False, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data.roll(1, 0) * 8)
    return model.to(torch.bfloat16).eval()


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


@torch.no_grad()
def exact_logits(model: PreTrainedModel, tokens: Tensor, given: dict[str, Any]) -> tuple[Tensor, float]:
    """Logits in fp64 that the tokens after the prompts were drawn from, and PyTorch's own largest error of them.

    Args:
        tokens: ``[rows, length]`` int64, which begin with the prompts.
        given: The call's arguments.
    """
    length = given["input_ids"].shape[1]
    mask = torch.ones_like(tokens)
    mask[:, :length] = given.get("attention_mask", mask[:, :length])
    inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    exact = copy.deepcopy(model).double()(**inputs).logits[:, length - 1 : -1]
    error = (model(**inputs).logits[:, length - 1 : -1] - exact).abs().max()
    return exact, error.item()


def lost_by(model: PreTrainedModel, tokens: Tensor, given: dict[str, Any]) -> tuple[float, float]:
    """By how much logits of the greedy tokens are below the largest in fp64, and PyTorch's own largest error."""
    exact, error = exact_logits(model, tokens, given)
    chosen = exact.gather(-1, tokens[:, given["input_ids"].shape[1] :, None])
    return (exact.amax(-1, keepdim=True) - chosen).max().item(), error


def lost_by_beams(model: PreTrainedModel, tokens: Tensor, stock: Tensor, given: dict[str, Any]) -> tuple[float, float]:
    """By how much scores of sequences are below stock's in fp64, and PyTorch's own largest error of logits."""
    scores, length = [], given["input_ids"].shape[1]
    for sequences in (tokens, stock):
        exact, error = exact_logits(model, sequences, given)
        chosen = exact.log_softmax(-1).gather(-1, sequences[:, length:, None])
        scores.append(chosen.mean(1))
    return (scores[1] - scores[0]).max().item(), error
