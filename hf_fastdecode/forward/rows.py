"""What a forward pass of the decoder is given, read on the host: each row's real tokens, and where they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import Unsupported
from ..generation.forward_pass import POSITIONS_OF_MASKS, PromptNames, reduced
from ..generation.support import is_nothing
from .trie import Numbers, Row, Trie, build_trie

NAMES: Final = PromptNames()

_READ: Final = frozenset({*NAMES, "use_cache", "output_hidden_states", "return_dict"})
WITHOUT_EFFECT: Final = frozenset({"num_items_in_batch", "cache_position", "logits_to_keep", "labels", "shift_labels"})
"""Arguments of losses, heads and cache slots, which trainers hand on to decoders, and which those ignore."""


@dataclass(frozen=True)
class Batch:
    """The rows of a pass."""

    inputs: Tensor  # [rows, width] ids, or embeddings [rows, width, hidden_size]
    are_ids: bool  # which of them
    rows: list[Row]  # the real tokens of each row
    counts_padding: bool  # whether positions count padding at the left, of which rows have different numbers
    planes: int  # how many planes position_ids has, which are all equal; 0 where it has none, or is not given

    @property
    def without_offsets(self) -> Batch:
        """The batch with positions that count from each row's first token."""
        return replace(self, rows=[row._replace(position=0) for row in self.rows])

    @property
    def width(self) -> int:
        return self.inputs.shape[1]

    def trie(self, *, least: int, saving: int, kept: Sequence[Row] = ()) -> Trie:
        """What rows and kept ones have in common, see `build_trie`; `Unsupported` for embeddings of one hash."""
        trie = build_trie(self.rows, self.width, least=least, saving=saving, kept=kept)
        if not self.are_ids:
            flat, index = self.inputs.flatten(0, 1), torch.from_numpy(trie.index.reshape(-1))
            real = index < len(trie.places)
            taken = torch.from_numpy(trie.places)[index[real]]
            if not torch.equal(flat[real.to(flat.device)], flat[taken.to(flat.device)]):
                raise Unsupported("different inputs_embeds have the same hash")
        return trie

    def arguments(self, trie: Trie) -> dict[str, Tensor]:
        """The packed row of distinct tokens, as the decoder takes it."""
        device = self.inputs.device
        places = torch.from_numpy(trie.places).to(device)
        positions = torch.from_numpy(trie.positions).to(device)[None]
        name = NAMES.ids if self.are_ids else NAMES.embeddings
        return {
            name: self.inputs.flatten(0, 1)[places][None],
            # With a mask, transformers does not take positions that begin anew for those of packed sequences.
            NAMES.mask: torch.ones_like(positions),
            NAMES.positions: positions.expand(self.planes, -1, -1) if self.planes else positions,
        }


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise `Unsupported` if a pass without a cache has other arguments than rows of tokens."""
    for name, value in given.items():
        if name not in _READ | WITHOUT_EFFECT and not is_nothing(value) and value is not False:
            raise Unsupported(f"the argument {name!r} is not shared in passes without a cache")


def read_batch(decoder: PreTrainedModel, given: Mapping[str, Any], *, least: int) -> Batch:
    """Read the rows of a pass, at least so many; raises `Unsupported` if their masks hide more than padding."""
    inputs = _inputs(given, least)
    (rows, width), are_ids = inputs.shape[:2], inputs.dim() == 2
    mask = _mask(given.get(NAMES.mask), rows, width)
    spans = [(0, width)] * rows if mask is None else list(_spans(mask))
    positions, planes = _positions(given.get(NAMES.positions), given.get(NAMES.mask), rows, width)
    if positions is None:
        counts_shown = decoder.config.model_type in POSITIONS_OF_MASKS
        firsts = [0 if counts_shown else start for start, _ in spans]
    else:
        firsts = [_first(row[start:stop]) for row, (start, stop) in zip(positions, spans, strict=True)]
    keys = _host(inputs) if are_ids else _hashes(inputs)
    read = [Row(row[start:stop], first, start) for row, (start, stop), first in zip(keys, spans, firsts, strict=True)]
    return Batch(inputs, are_ids, read, positions is None and len(set(firsts)) > 1, planes)


def _inputs(given: Mapping[str, Any], least: int) -> Tensor:
    """Ids ``[rows, width]`` or embeddings ``[rows, width, hidden_size]`` of at least so many rows."""
    ids, embeddings = given.get(NAMES.ids), given.get(NAMES.embeddings)
    if (ids is None) == (embeddings is None):
        raise Unsupported("the pass is given input_ids and inputs_embeds, or neither")
    inputs = ids if embeddings is None else embeddings
    if not isinstance(inputs, Tensor) or inputs.dim() != (2 if embeddings is None else 3):
        raise Unsupported(f"the pass is given tokens of shape {list(getattr(inputs, 'shape', []))}")
    if inputs.is_meta or type(inputs) not in (Tensor, nn.Parameter):
        raise Unsupported(f"the pass is given tokens whose values cannot be read ({type(inputs).__name__})")
    rows, width = inputs.shape[:2]
    if rows < least or not width:
        raise Unsupported(f"the pass has {rows} row{'' if rows == 1 else 's'} of {width} tokens")
    if embeddings is not None and embeddings.requires_grad and torch.is_grad_enabled():
        raise Unsupported("inputs_embeds need a gradient, each row's its own")
    return inputs


def _host(tensor: Tensor) -> Numbers:
    numbers: Numbers = tensor.detach().to("cpu", torch.int64).numpy()
    return numbers


def _mask(mask: Any, rows: int, width: int) -> Numbers | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.shape != (rows, width):
        raise Unsupported(
            f"attention_mask is not [rows, tokens] of the pass, but {list(getattr(mask, 'shape', [type(mask)]))}"
        )
    shown = _host(mask != 0)
    return None if shown.all() else shown


def _spans(shown: Numbers) -> Iterator[tuple[int, int]]:
    """The columns of each row's real tokens."""
    for row in shown:
        count = int(row.sum())
        start = int(row.argmax())
        if not row[start : start + count].all():
            raise Unsupported("attention_mask hides tokens between others")
        yield start, start + count


def _positions(position_ids: Any, mask: Any, rows: int, width: int) -> tuple[Numbers | None, int]:
    """Positions ``[rows, width]``, and the number of planes."""
    if position_ids is None:
        return None, 0
    ids, planes = reduced(position_ids, mask)
    if ids is None or ids.dim() != 2 or ids.shape[1] != width or len(ids) not in (1, rows):
        raise Unsupported("position_ids are not one for each token of each row")
    return np.broadcast_to(_host(ids), (rows, width)), planes


def _first(positions: Numbers) -> int:
    """The first of positions that count on from it."""
    if len(positions) and (np.diff(positions) != 1).any():
        raise Unsupported("position_ids do not count the tokens of a row one by one")
    return int(positions[0]) if len(positions) else 0


_HASHED_AT_ONCE: Final = 2**24
"""Elements of embeddings whose 64-bit products are in memory at once."""


def _hashes(embeddings: Tensor) -> Numbers:
    """A number ``[rows, width]`` for each embedding, equal for equal ones."""
    words = embeddings.detach().contiguous().view(torch.int16)
    generator = torch.Generator("cpu").manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (words.shape[-1],), generator=generator, device="cpu") | 1
    factors = factors.to(words.device)
    some = max(1, _HASHED_AT_ONCE // max(1, words[0].numel()))
    return np.concatenate([_host((part * factors).sum(-1)) for part in words.split(some)])
