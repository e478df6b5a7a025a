"""Kosmos-2: positions by the ids of a prompt, as Kosmos-2.5's, and a mask that its text model makes itself."""

from __future__ import annotations

from typing import Any

from ...attention.own_code import OwnCode


def no_mask(module: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for `Kosmos2TextTransformer._prepare_decoder_attention_mask`, which is causal and hides padding."""


KOSMOS = OwnCode({"Kosmos2TextTransformer": {"_prepare_decoder_attention_mask": no_mask}}, places_tokens=True)
