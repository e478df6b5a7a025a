"""Gemma 3n: layers that read other layers' keys need nothing; a constant keeps steps from being captured.

`Gemma3nTextMLP._gaussian_topk` copies its share of zeros to the device in every pass, which no CUDA graph can hold.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...attention.own_code import OwnCode


def gaussian_topk(module: Any, inputs: Tensor) -> Tensor:
    """Stands in for `Gemma3nTextMLP._gaussian_topk`: the largest of ``[..., inputs]`` above a quantile, else 0."""
    mean, deviation = inputs.mean(-1, keepdim=True), inputs.std(-1, keepdim=True, unbiased=False)
    return F.relu(inputs - (mean + deviation * _quantile(module.activation_sparsity, inputs.dtype)))


@cache
def _quantile(share: float, dtype: torch.dtype) -> float:
    """The quantile of the normal distribution below which this share lies, as rounded by transformers."""
    exact = torch.distributions.Normal(0, 1).icdf(torch.tensor(share, dtype=torch.float32, device="cpu"))
    return float(exact.to(dtype))


GEMMA3N = OwnCode({"Gemma3nTextMLP": {"_gaussian_topk": gaussian_topk}})
