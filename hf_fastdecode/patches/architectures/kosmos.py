"""Kosmos-2: positions by the ids of a prompt, as Kosmos-2.5's, and a mask that its text model makes itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...attention.own_code import Method, OwnCode


def no_mask(module: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for `Kosmos2TextTransformer._prepare_decoder_attention_mask`, which is causal and hides padding."""


def _of_kosmos(stand_ins: Mapping[str, Mapping[str, Method]]) -> OwnCode:
    return OwnCode(
        stand_ins,
        places_tokens=True,
        not_captured="it derives positions from the length of the cache, which a graph would keep",
    )


KOSMOS_FAMILY = {
    "kosmos2": _of_kosmos({"Kosmos2TextTransformer": {"_prepare_decoder_attention_mask": no_mask}}),
    "kosmos2_5": _of_kosmos({}),
}
"""By folder of ``transformers.models``."""
