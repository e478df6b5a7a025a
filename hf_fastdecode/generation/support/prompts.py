"""Checks of a call's prompts: their masks and positions, and what keeps them out of a kept cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from ...attention.own_code import own_code_of
from ...errors import Unsupported
from ..call_context import CallContext, Positions
from ..forward_pass import counts_padding, reads_positions
from ..structure import Structure

PLACED_OTHERWISE: Final = "tokens have other positions than those counted from a row's first"
"""Of padding that positions count, or of positions that a model makes; a kept cache knows neither."""


def check_prompts(
    model: PreTrainedModel,
    structure: Structure,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    positions: Positions = Positions(None),  # noqa: B008 - it is immutable
    *,
    longest: int,
) -> None:
    """Raise `Unsupported` for prompts, masks ``[rows, length]`` or positions that cannot share context.

    Masks are also checked where the `longest` row of the call, padding included, exceeds a window.
    """
    if input_ids.shape[1] == 0:
        raise Unsupported("the prompt is empty")
    if input_ids.dtype not in (torch.int64, torch.int32):  # of which stock's embeddings, if they refuse it, raise
        raise Unsupported(f"input_ids are {str(input_ids.dtype)[6:]}, not int64 or int32", "call the tokenizer")
    own = own_code_of(type(model))
    most = None if own is None else own.most_tokens(structure.text_config)
    if most is not None and longest > most:
        raise Unsupported(f"biases by distance are made for rows of up to {most} tokens, and max_length is {longest}")
    checks: list[tuple[Tensor, Callable[[], Unsupported]]] = []  # read from the device at once
    if attention_mask is None:
        expected = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    else:
        if attention_mask.shape != input_ids.shape:
            raise Unsupported(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}"
            )
        other = partial(Unsupported, "attention_mask holds values other than 0 and 1")
        checks.append((((attention_mask == 0) | (attention_mask == 1)).all(), other))
        remedy = "set padding_side='left' when calling the tokenizer"
        checks.append((attention_mask[:, -1].all(), partial(Unsupported, "a prompt ends in padding", remedy)))
        window = structure.layout.smallest_window
        counted_by = None if window is None or longest <= window else f"windows of {window} tokens"
        if own is not None and own.counts_hidden:
            counted_by = "its distances"
        if counted_by is not None:
            hides = f"attention_mask hides tokens inside a prompt, which {counted_by} count as seen"
            gaps = (attention_mask[:, 1:] < attention_mask[:, :-1]).any()
            checks.append((~gaps, partial(Unsupported, hides, of_prompts=True)))
        scales_from = None if own is None else own.scales_from(structure.text_config)
        if scales_from is not None and longest >= scales_from:
            padding = f"from {scales_from} tokens on, its attention scales with the padding of prompts"
            checks.append((attention_mask.all(), partial(Unsupported, padding, of_prompts=True)))
        expected = attention_mask.cumsum(-1, dtype=torch.long).sub_(1).masked_fill_(attention_mask == 0, 0)
    if counts_padding(model):
        expected = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    if (ids := positions.ids) is not None and not positions.differ:
        whole = ids.dtype in (
            torch.int32,
            torch.int64,
        )  # others are no rows of a table: stock raises where there is one
        comparable = whole and ids.dim() == 2 and ids.shape[1] == input_ids.shape[1]
        right = ids == expected if comparable else torch.zeros_like(expected, dtype=torch.bool)
        if positions.planes and attention_mask is not None:
            right = right | (attention_mask == 0)  # where planes have numbers of their own
        checks.append((right.all(), lambda: Unsupported(why_not_counted(model, positions))))
    passed = torch.stack([check for check, _ in checks]).tolist() if checks else []
    for holds, (_, error) in zip(passed, checks, strict=True):
        if not holds:
            raise error()


def require_rows(positions: Positions, rows: int) -> None:
    """Raise `Unsupported` for positions of another number of rows, as `generate` makes of one row for several prompts.

    Stock raises where the model reads them.
    """
    if (ids := positions.ids) is not None and ids.dim() > 1 and ids.shape[-2] not in (1, rows):
        remedy = "give each prompt its row, or leave them out"
        raise Unsupported(f"position_ids have {ids.shape[-2]} rows, and the call {rows}", remedy)


def require_counted(model: PreTrainedModel, mask: Tensor | None, positions: Positions) -> None:
    """Raise `Unsupported` for prompts with padding whose positions the model itself counts."""
    counts = reads_positions(model) and positions.ids is None and not prepares_positions(model)
    if mask is not None and counts and not bool(mask.all()):
        raise Unsupported("without position_ids, models count the padding of prompts in positions")


def prepares_positions(model: PreTrainedModel) -> bool:
    """Whether a decoder's positions count what the mask shows, by a method of its class (Whisper)."""
    own = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    return bool(model.config.is_encoder_decoder) and own


def why_not_counted(model: PreTrainedModel, positions: Positions) -> str:
    """Why positions are not those of the attention mask: the model makes others, or the caller gave them."""
    for name in ("_prepare_position_ids_for_generation", "prepare_inputs_for_generation"):
        if getattr(type(model), name, None) is not getattr(GenerationMixin, name, None):
            made_by, shape = f"{type(model).__name__}.{name}", positions.shape
            if len(shape) == 2:  # as those that a caller may give
                return f"position_ids, given or made by {made_by}, are not those of the attention mask"
            return (
                f"{type(model).__name__} makes position_ids of its own, of shape {shape}, which are not followed yet"
            )
    return "position_ids are not those of the attention mask"


def check_unkept(call: CallContext, *, kept: bool, hidden: bool = False, own_loop: bool = False) -> None:
    """Raise `Unsupported` if a cache, which knows tokens alone, would outlive a call of which they do not say all.

    Those of images do where their ids do (`image_ids`), and the model itself makes positions of them. Or for hidden
    states, which are spread to rows by tokens.

    Args:
        own_loop: Whether a loop of the user's own decodes, which may place tokens otherwise.
    """
    what = "the planes of position_ids differ"
    if call.inputs is not None:
        what = f"prompts come with {next(iter(call.inputs.arguments))}"
    if hidden:
        raise Unsupported(f"output_hidden_states is for positions of text, and {what}")
    if (call.inputs is not None and not call.places_given and not own_loop) or not (call.must_share or kept):
        return
    if call.must_share:
        raise Unsupported(f"a SharedContextCache is for positions of text, and {what}")
    raise Unsupported(f"{what}, and the call's cache would be kept")
