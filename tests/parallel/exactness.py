"""Whether tokens and logits in half precision are as good as errors of arithmetic allow, against fp64."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


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
