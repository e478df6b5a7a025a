"""Verify a converted checkpoint: its logits on the calibration text, with a cache, against those of its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.fit.eight_bits import EIGHT_BITS

from ...patches.layers.encoder_decoder import EncoderDecoder
from ...patches.layers.family import Family, language_config
from ..fit.cache_errors import dtype_name
from .rounded_cache import RoundedCache

_EPS: Final = {
    dtype_name(dtype): torch.finfo(dtype).eps
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
} | {"int8": 1 / 127}
"""Relative rounding step of each cache dtype."""

_SUMMATION: Final = 4.0
"""Rounding errors of a sum of products in fp32, as a multiple of those of its terms."""


class VerificationError(ValueError):
    """The slim model's logits are farther from the ordinary one's than its layers' errors allow."""


@dataclass(frozen=True)
class Verification:
    """Relative errors of logits, in the Frobenius norm, against the ordinary model in fp64.

    Attributes:
        slim_error: Of the slim model in its dtype.
        ordinary_error: Of the ordinary model in the same dtype, with keys and values in int8 in layers that the slim
            model caches in 8 bits.
        bound: That the first was held to.
        same_tokens: Share of positions where slim and fp64 give the same most likely token.
    """

    slim_error: float
    ordinary_error: float
    bound: float
    same_tokens: float

    def to_dict(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)


def verify(
    ordinary: tuple[Path, Any],
    slim: tuple[Path, Any],
    family: Family | EncoderDecoder,
    dtype: torch.dtype,
    logits: Callable[..., Tensor],
    tolerance: float,
    accumulated: float,
) -> Verification:
    """Compare logits; models are loaded whole, one after the other: the ordinary one in fp64, then both in `dtype`.

    The bound is `tolerance` times the error of the ordinary model with the caches that layers were held to, plus the
    error of fp32 accumulators in values from keys.

    Args:
        ordinary: Folder and config of the ordinary model.
        slim: Folder and config of the slim one.
        family: Of both.
        dtype: That they run in.
        logits: Of a model, read from its cache, such as `text_logits` of a text.
        tolerance: At least 1.
        accumulated: From `accumulation_error`.

    Raises:
        VerificationError: The slim model is farther off.
    """
    oracle = logits(_load(ordinary, torch.float64, family.auto))
    entries = language_config(slim[1]).layer_plans
    in_eight_bits = [at for at, layer in enumerate(entries) if layer.cache_dtype in map(dtype_name, EIGHT_BITS)]
    stock = logits(_load(ordinary, dtype, family.auto), int8_layers=in_eight_bits)
    found = logits(_load(slim, dtype, family.slim_model))
    norm = torch.linalg.norm(oracle)
    errors = [(torch.linalg.norm(one - oracle) / norm).item() for one in (found, stock)]
    bound = tolerance * errors[1] + accumulated
    same = (found.argmax(-1) == oracle.argmax(-1)).double().mean().item()
    checked = Verification(errors[0], errors[1], bound, same)
    if not checked.slim_error <= bound:
        raise VerificationError(
            f"logits of the slim model are off by {checked.slim_error:.3g}, and may be by {bound:.3g} (the ordinary "
            f'model in this dtype: {checked.ordinary_error:.3g}); try `plan="auto"`, a smaller `tolerance` or a '
            "larger `rank`"
        )
    return checked


def accumulation_error(layers: Sequence[Mapping[str, Any]]) -> float:
    """Error of the logits that rounding in fp32 adds: of their own sums, and of those that give values from keys.

    Rounding the cached keys makes the measured `value_error`. Rounding sums of their products is amplified as much,
    but smaller by the ratio of the precisions. (The condition number is no useful bound: it ignores V-coordinates, and
    from 1e7 on it allows any error.)

    Args:
        layers: Of a conversion report.
    """
    eps = torch.finfo(torch.float32).eps
    from_keys = [layer for layer in layers if layer["plan"] in ("k", "k+r")]
    amplified = sum(layer["value_error"] / _EPS.get(layer.get("dtype", ""), eps) for layer in from_keys)
    return eps * (1 + _SUMMATION * amplified)


def _load(checkpoint: tuple[Path, Any], dtype: torch.dtype, loader: Any) -> PreTrainedModel:
    folder, config = checkpoint
    model: PreTrainedModel = loader.from_pretrained(folder, config=config, dtype=dtype)
    return model.eval()


def text_logits(model: PreTrainedModel, ids: Tensor, int8_layers: Sequence[int] = ()) -> Tensor:
    """Logits of ids ``[tokens]``, fp64: the second half reads the first from the cache, token by token at its end.

    Args:
        model: The model.
        ids: The text.
        int8_layers: Layers whose keys and values are cached in int8.
    """
    half = len(ids) // 2
    steps = min(8, half - 1)
    cache = RoundedCache(model.config, torch.int8, int8_layers)
    parts = ids.split([half, len(ids) - half - steps, *[1] * steps])
    with torch.no_grad():
        return torch.cat([model(part[None], **{CACHE: cache}).logits[0].double() for part in parts])
