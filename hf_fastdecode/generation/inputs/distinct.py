"""The distinct inputs of a call whose keys and values are stored: what an encoder runs on, or layers' own images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ...cache.layers.cross import ENCODER_OUTPUTS, EncodedInputs, ImageInputs
from ...errors import Unsupported


class FoundInputs(NamedTuple):
    """The distinct inputs of a call, and for each row which one is its: ``[rows]`` int64 on the CPU."""

    inputs: EncodedInputs
    of_rows: Tensor


def find_inputs(arguments: Mapping[str, Any], prompts: int) -> FoundInputs | None:
    """Compare neighbouring rows' encoder outputs and attention masks; None without an encoder.

    Rows are equal where the encoder's output is equal bit by bit, as it is for samples and beams, which are copies.

    Raises:
        Unsupported: The encoder's output has another form, or other rows than so many prompts of the decoder.
    """
    outputs = arguments.get(ENCODER_OUTPUTS)
    if outputs is None:
        return None
    named = dict(outputs) if isinstance(outputs, ModelOutput) else {}
    hidden = named.get("last_hidden_state", outputs[0] if len(outputs) else None)
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or not len(hidden):
        raise Unsupported("the encoder's output is not [rows, tokens, numbers]")
    rows, mask = len(hidden), arguments.get("attention_mask")
    if rows != prompts:  # Whisper repeats its features, and not a decoder's prompts
        raise Unsupported(f"a decoder's prompts have {prompts} rows, and its encoder's output {rows}")
    if isinstance(mask, Tensor) and len(mask) != rows:
        mask = None  # of whole recordings, which Whisper's encoder alone reads
    per_row = {"last_hidden_state": hidden} | _per_row(named, rows)
    of_rows, firsts = _distinct_rows([*per_row.values(), *([mask] if isinstance(mask, Tensor) else [])])
    kind = type(outputs) if isinstance(outputs, ModelOutput) else BaseModelOutput
    of_inputs = kind(**{name: _selected(one, firsts) for name, one in per_row.items()})
    given: dict[str, Any] = {ENCODER_OUTPUTS: of_inputs}
    if isinstance(mask, Tensor):
        given["attention_mask"] = _selected(mask, firsts)
    return FoundInputs(EncodedInputs(given, len(firsts), hidden.shape[1]), of_rows)


def find_image_inputs(
    arguments: Mapping[str, Any], rows: Sequence[int], text: Any, vision: Any, mask: str
) -> FoundInputs:
    """The images that layers of a decoder's own attend to, of distinct prompts with so many rows each.

    Args:
        text: The decoder's config, and `vision` that of its images.
        mask: The argument that says which images a token sees.

    Raises:
        Unsupported: The images have another form.
    """
    pixels = arguments.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.dim() != 6:
        raise Unsupported("its images are not pixel_values [rows, images, tiles, channels, height, width]")
    tokens = pixels.shape[1] * pixels.shape[2] * ((vision.image_size // vision.patch_size) ** 2 + 1)
    layers, heads = text.cross_attention_layers, text.num_attention_heads
    of_rows = torch.arange(len(rows), device="cpu").repeat_interleave(torch.tensor(rows, device="cpu"))
    return FoundInputs(ImageInputs(len(rows), tokens, layers, heads, mask), of_rows)


def encode_distinct(
    encode: Callable[[Tensor, dict[str, Any]], dict[str, Any]],
    inputs: Tensor,
    arguments: dict[str, Any],
    at_once: int | None = None,
) -> dict[str, Any]:
    """Run an encoder on the distinct ones among neighbouring rows, and give each row its output.

    Args:
        encode: Adds the encoder's output of inputs to these model arguments.
        inputs: ``[rows, ...]``, of which model arguments of as many rows are the rows' own.
        at_once: Most inputs of a pass; all when None.
    """
    own = _per_row(arguments, len(inputs))
    of_rows, firsts = _distinct_rows([inputs, *own.values()])
    groups = firsts.split(at_once or len(firsts))
    if len(firsts) == len(inputs) and len(groups) == 1:
        return encode(inputs, arguments)
    passes = [
        encode(_selected(inputs, group), arguments | {name: _selected(one, group) for name, one in own.items()})
        for group in groups
    ]
    outputs = [found for one in passes if isinstance(found := one.get(ENCODER_OUTPUTS), ModelOutput)]
    if len(outputs) < len(passes):
        return encode(inputs, arguments)
    joined, counts = outputs[0], list(map(len, groups))
    for name in joined:
        joined[name] = _of_all_rows([one[name] for one in outputs], counts, of_rows)
    return passes[0] | own | {ENCODER_OUTPUTS: joined}


def tokens_of_encoder(model: PreTrainedModel, inputs: Tensor) -> int | None:
    """Tokens of each input in an encoder's passes; None where neither inputs nor config say it."""
    if model.main_input_name == "input_ids":
        return inputs.shape[1]
    return getattr(model.config, "max_source_positions", None)


def _of_all_rows(outputs: Sequence[Any], counts: Sequence[int], of_rows: Tensor) -> Any:
    """One field of the encoder's output for all rows, of the passes over so many distinct inputs."""
    first = outputs[0]
    if isinstance(first, tuple):
        return tuple(_of_all_rows(parts, counts, of_rows) for parts in zip(*outputs, strict=True))
    if not isinstance(first, Tensor) or first.shape[:1] != (counts[0],):
        return first
    whole = torch.cat(list(outputs)) if len(outputs) > 1 else first
    return _selected(whole, of_rows)


def _per_row(arguments: Mapping[str, Any], rows: int) -> dict[str, Tensor]:
    return {name: one for name, one in arguments.items() if isinstance(one, Tensor) and one.shape[:1] == (rows,)}


def _distinct_rows(compared: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """For each row of tensors ``[rows, ...]`` the number of its distinct neighbour, ``[rows]``, and the first row of
    each of these: int64, on the CPU."""
    device = compared[0].device
    alike = [one[1:] == one[:-1] for one in compared]
    same = torch.stack([(one.flatten(1).all(1) if one.dim() > 1 else one).to(device) for one in alike]).all(0).cpu()
    of_rows = torch.cat([torch.zeros(1, dtype=torch.long, device="cpu"), (~same).long()]).cumsum(0)
    return of_rows, torch.searchsorted(of_rows, torch.arange(int(of_rows[-1]) + 1, device="cpu"))


def _selected(one: Tensor, rows: Tensor) -> Tensor:
    """Some of the rows, in order; the tensor itself for all."""
    return one if len(rows) == len(one) else one.index_select(0, rows.to(one.device))
