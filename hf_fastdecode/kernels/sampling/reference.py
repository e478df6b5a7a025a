"""fp64 reference of `sample` in PyTorch: the distribution by sorting, draws from the same random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .api import Settings


def processed_logits(
    logits: Tensor, row_ids: Tensor, settings: Settings, seen: Tensor | None = None, steps: Tensor | None = None
) -> Tensor:
    """Logits ``[rows, vocab]`` in fp64 after repetition penalty, suppression of tokens and temperature."""
    values = logits.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    token = torch.arange(logits.shape[1], device=logits.device)
    if settings.features["repetition_penalty"] and seen is not None:
        marked = ((seen[row_ids.long().clamp(0, len(seen) - 1)][:, token // 32] >> (token % 32)) & 1).bool()
        penalty = settings.repetition_penalty.double()
        values = torch.where(marked, torch.where(values < 0, values * penalty, values / penalty), values)
    if settings.eos_count:
        early = _steps(row_ids, settings, steps) < settings.min_new_tokens
        values = values.masked_fill(early[:, None] & torch.isin(token, settings.eos_ids), -torch.inf)
    if settings.suppressed is not None:
        at_begin = (_steps(row_ids, settings, steps) == settings.begin_step).long()
        values = values.masked_fill(settings.suppressed[at_begin] != 0, -torch.inf)
    return values if settings.greedy else values / settings.temperature.double()


def _steps(row_ids: Tensor, settings: Settings, steps: Tensor | None) -> Tensor:
    """Tokens drawn so far of each row, ``[rows]`` int64."""
    return settings.step.expand(len(row_ids)) if steps is None else steps


def _softmax(values: Tensor, left: Tensor) -> Tensor:
    return values.masked_fill(~left, -torch.inf).softmax(-1).nan_to_num(0.0)


def _top_k(values: Tensor, settings: Settings) -> Tensor:
    k = min(int(settings.top_k), values.shape[1])
    if k == 0:
        return torch.ones_like(values, dtype=torch.bool)
    return values >= values.topk(k).values[:, -1:]


def _top_p_and_min_p(values: Tensor, left: Tensor, settings: Settings) -> Tensor:
    p = _softmax(values, left)
    if settings.top_p < 1:
        order = values.masked_fill(~left, -torch.inf).sort(dim=-1, stable=True).indices
        total = p.gather(1, order).cumsum(-1)
        kept = total > 1 - settings.top_p.double()
        kept[:, -1] = True
        left = left & torch.zeros_like(left).scatter(1, order, kept)
    p = _softmax(values, left)
    return left & (p >= settings.min_p.double() * p.amax(-1, keepdim=True))


def _surprise(values: Tensor, left: Tensor) -> Tensor:
    """Distance of a token's surprise ``-log p`` from the entropy (Meister et al., typical sampling)."""
    log_p = values.masked_fill(~left, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).nansum(-1, keepdim=True)
    return (-log_p - entropy).abs()


def _typical(values: Tensor, left: Tensor, settings: Settings) -> Tensor:
    if settings.typical_p >= 1:
        return left
    distance, order = _surprise(values, left).sort(dim=-1)
    total = _softmax(values, left).gather(1, order).cumsum(-1)
    last = (total < settings.typical_p.double()).sum(-1, keepdim=True).clamp(max=values.shape[1] - 1)
    return left & (_surprise(values, left) <= distance.gather(1, last))


def distribution(
    logits: Tensor, row_ids: Tensor, settings: Settings, seen: Tensor | None = None, steps: Tensor | None = None
) -> Tensor:
    """Probabilities after all filters, ``[rows, vocab]`` fp64; arguments as for `processed_logits`."""
    values = processed_logits(logits, row_ids, settings, seen, steps)
    left = _top_k(values, settings) & (values > -torch.inf)
    return _softmax(values, _typical(values, _top_p_and_min_p(values, left, settings), settings))


def uniforms(seed: int, step: int | Tensor, row_ids: Tensor, turn: int) -> Tensor:
    """Two uniform numbers in [0, 1) per row, ``[rows, 2]`` fp64.

    Philox 4x32 with 10 rounds (Salmon et al., 2011), keyed by the seed, with counter (row id, turn, step). Each pair
    of words gives a fraction of 53 bits: the first word, and the upper 21 bits of the second.
    """
    mask = 0xFFFFFFFF
    row = row_ids.long() & mask
    steps = torch.as_tensor(step, device=row.device).expand_as(row)
    c = [row, torch.full_like(row, turn), steps & mask, (steps >> 32) & mask]
    key = [seed & mask, (seed >> 32) & mask]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]  # int64 wraps around, which keeps bits 32 to 63
        c = [
            ((second >> 32) & mask) ^ c[1] ^ key[0],
            second & mask,
            ((first >> 32) & mask) ^ c[3] ^ key[1],
            first & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    words = [word.double() for word in c[:1] + c[2:3]]
    tails = [(word >> 11).double() for word in c[1:2] + c[3:4]]
    return torch.stack([word * 2.0**-32 + tail * 2.0**-53 for word, tail in zip(words, tails, strict=True)], -1)


def _draw_index(mass: Tensor, uniform: Tensor) -> Tensor:
    reach = mass.cumsum(-1)
    return ((reach > uniform[:, None] * reach[:, -1:]) & (mass > 0)).int().argmax(-1)


def _draw(mass: Tensor, pair: Tensor, columns: int) -> Tensor:
    """Draw a column by its mass, then one of its tokens: ``mass`` ``[rows, vocab]`` to ``[rows]``."""
    rows, vocab = mass.shape
    table = torch.nn.functional.pad(mass, (0, -vocab % columns)).view(rows, -1, columns)
    column = _draw_index(table.sum(1), pair[:, 0])
    chunk = _draw_index(table[torch.arange(rows, device=mass.device), :, column], pair[:, 1])
    return chunk * columns + column


def sample(
    logits: Tensor,
    row_ids: Tensor,
    settings: Settings,
    *,
    columns: int,
    seen: Tensor | None = None,
    steps: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The tokens and log-probabilities of `api.sample`, except for rounding; ``columns`` as in its `Config`.

    Draws from all tokens that top-k keeps; when a filter rejects the token, draws again from those ranked before it.
    typical-p ranks by surprise, after the other filters.
    """
    rows = torch.arange(len(logits), device=logits.device)
    values = processed_logits(logits, row_ids, settings, seen, steps)
    if settings.greedy:
        drawn = values.argmax(-1)
    else:
        final = distribution(logits, row_ids, settings, seen, steps) > 0
        left = _top_k(values, settings) & (values > -torch.inf)
        surprise = None
        if settings.typical_p < 1:
            left = _top_p_and_min_p(values, left, settings)
            surprise = _surprise(values, left)
        weight = (values - values.amax(-1, keepdim=True)).exp()
        index = torch.arange(logits.shape[1], device=logits.device)
        drawn = torch.zeros_like(rows)
        doubt = left.any(-1) & (values < torch.inf).all(-1)
        turn = 0
        while doubt.any():
            pair = uniforms(int(settings.seed), _steps(row_ids, settings, steps), row_ids, turn)
            drawn = torch.where(doubt, _draw(weight * left, pair, columns), drawn)
            doubt = doubt & ~final[rows, drawn]
            value = values[rows, drawn][:, None]
            before = (values > value) | ((values == value) & (index > drawn[:, None]))
            if surprise is not None:
                before = surprise < surprise[rows, drawn][:, None]
            else:
                light = weight[rows, drawn][:, None] < settings.min_p
                before = torch.where(light, weight >= settings.min_p, before)
            left = left & before
            turn += 1
    raw = torch.where(logits.isnan(), -torch.inf, logits.double())
    logprobs = raw.log_softmax(-1)[rows, drawn].masked_fill((values == -torch.inf).all(-1), torch.nan)
    skipped = row_ids < 0
    if settings.features["repetition_penalty"] and seen is not None:
        skipped = skipped | (row_ids >= len(seen))
    return torch.where(skipped, settings.pad_token_id, drawn), logprobs.masked_fill(skipped, 0.0).float()
