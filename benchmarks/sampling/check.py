"""The check before sampling is timed: tokens that transformers could draw too, and log-probabilities as precise."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..ops.accuracy import BOUND


def outside_support(logits: Tensor, tokens: Tensor, processors: LogitsProcessorList, *, greedy: bool) -> int:
    """How many of the tokens ``[rows, draws]`` int64 transformers would never draw from logits ``[rows, vocabulary]``.

    Its own processors each leave the largest logits, and -inf in place of the others; greedy, only the first of the
    largest may be taken. Of tokens that tie at the edge of top-p, its sort, which is not stable, leaves any: a token
    counts when its logit is below all that are left. The filters sum probabilities in fp32, so a token at the edge may
    fall on either side: one that they remove in fp32 counts only if they remove it in fp64 too.
    """

    def removed(row: Tensor, dtype: torch.dtype) -> Tensor:
        ids = tokens.new_zeros(len(row), 1)  # none of the processors reads the tokens so far
        scores = processors(ids, logits[row].to(dtype, copy=True))
        if greedy:
            return tokens[row] != scores.argmax(-1, keepdim=True)
        edge = logits[row].masked_fill(scores == -torch.inf, torch.inf).amin(-1, keepdim=True)
        return logits[row].gather(1, tokens[row]) < edge

    if bool(((tokens < 0) | (tokens >= logits.shape[1])).any()):
        return tokens.numel()
    doubtful = removed(torch.arange(len(logits), device=logits.device), torch.float32)
    rows = doubtful.any(1).nonzero().flatten()
    return int((doubtful[rows] & removed(rows, torch.float64)).sum()) if len(rows) else 0


def logprob_error(logits: Tensor, tokens: Tensor, logprobs: Tensor) -> float:
    """How many times the error of PyTorch's fp32 `log_softmax` the log-probabilities err, against fp64.

    PyTorch's error counts at least as what rounding the log-sum-exp and the result to fp32 may lose. Of logits
    ``[rows, vocabulary]``, tokens ``[rows, draws]`` int64 and their log-probabilities in fp32.
    """
    chosen, total = logits.double().gather(1, tokens), logits.double().logsumexp(-1, keepdim=True)
    oracle = chosen - total  # [rows, draws]
    theirs = logits.float().log_softmax(-1).gather(1, tokens).double() - oracle
    unit = torch.finfo(torch.float32).eps / 2 * (total.abs().max() + oracle.abs().max())
    ratio = (logprobs.double() - oracle).abs().max() / torch.maximum(theirs.abs().max(), unit)
    return float(ratio.nan_to_num(nan=torch.inf))


def red(
    logits: Tensor, tokens: Tensor, logprobs: Tensor, processors: LogitsProcessorList, *, greedy: bool
) -> tuple[str | None, float]:
    """What a row's status says when the draws are wrong, else None; and the error of the log-probabilities."""
    error = logprob_error(logits, tokens.clamp(0, logits.shape[1] - 1), logprobs)
    if outside := outside_support(logits, tokens, processors, greedy=greedy):
        what = "are not the most likely" if greedy else "are none that transformers leaves"
        return f"wrong: {outside} of {tokens.numel()} tokens {what}", error
    if not error <= BOUND:
        return f"wrong: log-probabilities err {error:.2f} times PyTorch's error, at most {BOUND:g} is right", error
    return None, error
