"""Encoder-decoders: the names of a decoder's prompts among model arguments, and the distinct inputs of a call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ..cache.layers.cross import EncodedInputs
from ..errors import Unsupported

ENCODER_OUTPUTS: Final = "encoder_outputs"
"""Name of the encoder's output among model arguments."""


class PromptNames(NamedTuple):
    """Names of arguments that say what the decoder, or the whole model if it has no encoder, is given."""

    ids: str = "input_ids"
    embeddings: str = "inputs_embeds"
    mask: str = "attention_mask"
    positions: str = "position_ids"

    def named(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that have the names of a model without an encoder, renamed."""
        names = dict(zip(PromptNames(), self, strict=True))
        return {names.get(name, name): value for name, value in arguments.items()}


_OF_DECODERS: Final = PromptNames(*(f"decoder_{name}" for name in PromptNames()))
_ALONE: Final = PromptNames()


def prompt_names(model: PreTrainedModel) -> PromptNames:
    """The names that a model's `forward`, and `generate`, have for its prompts."""
    return _OF_DECODERS if model.config.is_encoder_decoder else _ALONE


class FoundInputs(NamedTuple):
    """The distinct inputs of a call, and for each row which one is its: ``[rows]`` int64 on the CPU."""

    inputs: EncodedInputs
    of_rows: Tensor


def find_inputs(arguments: Mapping[str, Any]) -> FoundInputs | None:
    """Compare neighbouring rows' encoder outputs and attention masks; None without an encoder.

    Rows are equal where the encoder's output is equal bit by bit, as it is for samples and beams, which are copies.

    Args:
        arguments: Model arguments of all rows.

    Raises:
        Unsupported: They hold the encoder's output in another form.
    """
    outputs = arguments.get(ENCODER_OUTPUTS)
    if outputs is None:
        return None
    named = dict(outputs) if isinstance(outputs, ModelOutput) else {}
    hidden = named.get("last_hidden_state", outputs[0] if len(outputs) else None)
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or not len(hidden):
        raise Unsupported("the encoder's output is not [rows, tokens, numbers]")
    rows, mask = len(hidden), arguments.get("attention_mask")
    if isinstance(mask, Tensor) and len(mask) != rows:
        raise Unsupported(f"attention_mask has {len(mask)} rows, the encoder's output {rows}")
    per_row = {name: one for name, one in named.items() if isinstance(one, Tensor) and one.shape[:1] == (rows,)}
    compared = [hidden, *per_row.values(), *([mask] if isinstance(mask, Tensor) else [])]
    same = torch.stack([(one[1:] == one[:-1]).flatten(1).all(1).to(hidden.device) for one in compared]).all(0).cpu()
    of_rows = torch.cat([torch.zeros(1, dtype=torch.long, device="cpu"), (~same).long()]).cumsum(0)
    count = int(of_rows[-1]) + 1
    firsts = torch.searchsorted(of_rows, torch.arange(count, device="cpu"))

    def distinct(one: Tensor) -> Tensor:
        return one if count == rows else one.index_select(0, firsts.to(one.device))

    kind = type(outputs) if isinstance(outputs, ModelOutput) else BaseModelOutput
    of_inputs = kind(**{name: distinct(one) for name, one in ({"last_hidden_state": hidden} | per_row).items()})
    given: dict[str, Any] = {ENCODER_OUTPUTS: of_inputs}
    if isinstance(mask, Tensor):
        given["attention_mask"] = distinct(mask)
    return FoundInputs(EncodedInputs(given, count, hidden.shape[1]), of_rows)
