"""Verify a converted checkpoint: its logits on the calibration text, with a cache, against those of its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...patches.layers.family import EncoderDecoder, Family, language_config
from ..fit.cache_errors import dtype_name, relative_error
from ..fit.cached_numbers import EIGHT_BITS
from .rounded_cache import cached_logits

_EPS: Final = {
    dtype_name(dtype): torch.finfo(dtype).eps
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
} | {"int8": 1 / 127}
"""Relative rounding step of each cache dtype."""

_SUMMATION: Final = 4.0
"""Rounding errors of a sum of products in fp32, as a multiple of those of its terms."""


class VerificationError(ValueError):
    """The slim model's logits have a larger error than its layers' errors allow."""


@dataclass(frozen=True)
class Verification:
    """Relative errors of logits, in the Frobenius norm, against the ordinary model in fp64.

    Attributes:
        slim_error: Error of the slim model in its dtype; `bound` is the largest acceptable one.
        ordinary_error: Error of the ordinary model in the same dtype, with keys and values in int8 in layers that the
            slim model caches in 8 bits.
        same_tokens: Share of positions where slim and fp64 give the same most likely token.
    """

    slim_error: float
    ordinary_error: float
    bound: float
    same_tokens: float


def verify(
    ordinary: tuple[Path, Any],
    slim: tuple[Path, Any],
    family: Family | EncoderDecoder,
    dtype: torch.dtype,
    inputs: dict[str, Tensor],
    tolerance: float,
    layers: Sequence[Mapping[str, Any]],
) -> Verification:
    """Compare logits on `model_inputs`; models, given as folder and config, are loaded whole, one after the other.

    The ordinary one is loaded in fp64, then both in `dtype`. The bound is `tolerance`, at least 1, times the error of
    the ordinary model with the layers' baseline caches, plus the error of fp32 accumulators in values from keys, by
    the `layers` of a conversion report. Raises VerificationError where the slim model's error exceeds it.
    """
    oracle = cached_logits(_load(ordinary, torch.float64, family.auto), inputs)
    entries = language_config(slim[1]).layer_plans
    in_eight_bits = [at for at, layer in enumerate(entries) if layer.cache_dtype in map(dtype_name, EIGHT_BITS)]
    stock = cached_logits(_load(ordinary, dtype, family.auto), inputs, in_eight_bits)
    found = cached_logits(_load(slim, dtype, family.slim_model), inputs)
    errors = [relative_error(one, oracle) for one in (found, stock)]
    bound = tolerance * errors[1] + _accumulation_error(layers)
    same = (found.argmax(-1) == oracle.argmax(-1)).double().mean().item()
    checked = Verification(errors[0], errors[1], bound, same)
    if not checked.slim_error <= bound:
        raise VerificationError(
            f"logits of the slim model are off by {checked.slim_error:.3g}, and may be by {bound:.3g} (the ordinary "
            f'model in this dtype: {checked.ordinary_error:.3g}); try `plan="auto"`, a smaller `tolerance` or a '
            "larger `rank`"
        )
    return checked


def _accumulation_error(layers: Sequence[Mapping[str, Any]]) -> float:
    """Error of the logits that rounding in fp32 adds: of their own sums, and of those that give values from keys.

    Rounding the cached keys makes the measured `value_error`. Rounding sums of their products is amplified as much,
    but smaller by the ratio of the precisions. (The condition number is no useful bound: it ignores V-coordinates, and
    from 1e7 on it allows any error.)
    """
    eps = torch.finfo(torch.float32).eps
    from_keys = [layer for layer in layers if layer["plan"] in ("k", "k+r")]
    amplified = sum(layer["value_error"] / _EPS.get(layer.get("dtype", ""), eps) for layer in from_keys)
    return eps * (1 + _SUMMATION * amplified)


def _load(checkpoint: tuple[Path, Any], dtype: torch.dtype, loader: Any) -> PreTrainedModel:
    folder, config = checkpoint
    model: PreTrainedModel = loader.from_pretrained(folder, config=config, dtype=dtype)
    return model.eval()
