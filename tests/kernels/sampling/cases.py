"""Settings, transformers' own processors for them, and logits."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_fastdecode.kernels.sampling.api import Settings

CHAINS = (
    {},
    {"top_p": 0.9},
    {"top_p": 0.31},
    {"top_k": 7},
    {"top_k": 20, "top_p": 0.6},
    {"min_p": 0.08},
    {"top_p": 0.8, "min_p": 0.04},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
    {"typical_p": 0.5},
    {"top_k": 25, "typical_p": 0.4},
    {"top_p": 0.7, "typical_p": 0.6},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.7},
)
WARPERS = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
WARPERS["typical_p"] = TypicalLogitsWarper


def name_of(numbers: dict[str, float]) -> str:
    return "-".join(f"{name}={value}" for name, value in numbers.items()) or "temperature"


def settings_for(numbers: dict[str, float], device: str = "cpu", **more: float) -> Settings:
    settings = Settings(device, top_k="top_k" in numbers, typical="typical_p" in numbers)
    settings.update(**{"temperature": 0.8, **numbers, **more})
    return settings


def processed_by_transformers(logits: Tensor, numbers: dict[str, float], temperature: float = 0.8) -> Tensor:
    """Probabilities ``[rows, vocab]`` that ``generate`` hands to multinomial."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    processors += [WARPERS[name](numbers[name]) for name in WARPERS if name in numbers]
    ids = torch.zeros(len(logits), 1, dtype=torch.long, device=logits.device)
    return processors(ids, logits.to(torch.float32, copy=True)).softmax(-1)


def ids_of(rows: int, device: str = "cpu") -> Tensor:
    return torch.arange(rows, dtype=torch.int32, device=device)


def assert_drawn_from(counts: Tensor, probabilities: Tensor) -> None:
    """Pearson's chi-square at five standard deviations, and nothing outside of the support."""
    counts, probabilities = counts.double(), probabilities.double()
    assert counts[probabilities == 0].sum() == 0, "a token was drawn that transformers removes"
    expected = probabilities * counts.sum()
    often = expected >= 10  # the others are pooled
    observed = torch.cat([counts[often], counts[~often].sum()[None]])
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    observed, expected = observed[expected > 1], expected[expected > 1]
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < freedom + 5 * (2 * max(freedom, 1)) ** 0.5, (statistic, freedom)
