"""Prefixes that passes without gradients keep for later ones: keys, values and last hidden states (`reuse_prefix`).

A pass keeps the nodes that several of its rows read, or rows of the last pass, and those kept before that it has used.
So a prompt that all rows of many passes begin with, as an evaluation's examples, is computed once, or twice where rows
come one by one. Passes that share nothing run stock, and their ids alone are remembered until the next pass.
With ``log_probs="trainer"`` a pass also keeps last hidden states of all its rows, for later ones over some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..generation.fingerprint import ModelThen as ModelThen
from .trie import Numbers, Row, Trie

Layers = dict[int, tuple[Tensor, Tensor]]
"""Keys and values of each layer by its index, ``[1, kv_heads, tokens, head_dim]``."""


@dataclass(frozen=True)
class Prefixes:
    """What a pass has kept."""

    rows: list[Row] = field(default_factory=list)  # the kept tokens in paths, with where they are stored
    layers: Layers = field(default_factory=dict)  # keys and values of the kept tokens
    hidden: Tensor | None = None  # [1, tokens, hidden_size]: their last hidden states; None if there are none
    then: ModelThen | None = None  # the decoder that computed them, likewise
    seen: list[Row] = field(default_factory=list)  # the rows of the last pass, if it kept none of their tokens

    @property
    def rows_and_seen(self) -> list[Row]:
        return [*self.rows, *self.seen]

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None  # a copy of the model has other weights

    def at(self, trie: Trie) -> tuple[Layers, Tensor]:
        """Keys and values, and hidden states, of the stored nodes of a trie, in its order."""
        assert self.hidden is not None
        chosen = np.concatenate([run.stored for run in trie.runs if run.stored is not None])
        return _selected(self.layers, self.hidden, chosen)


def keep(rows: list[Row], trie: Trie, layers: Layers, hidden: Tensor, then: ModelThen, most: int) -> Prefixes | None:
    """Keep what later passes may begin with; None if that is nothing, or more than `most` bytes.

    Keys, values and hidden states ``[1, tokens, hidden_size]`` are of all nodes' tokens.
    """
    chosen = [number for number, run in enumerate(trie.runs) if run.repeats or run.stored is not None]
    if not chosen:
        return None
    nodes, total = trie.tree.nodes, hidden.shape[1]
    tokens = np.concatenate([np.arange(nodes[one].start, nodes[one].start + nodes[one].length) for one in chosen])
    parts = [hidden, *(part for pair in layers.values() for part in pair)]
    if sum(part.nbytes for part in parts) // total * len(tokens) > most:
        return None
    place: Numbers = np.full(total, -1, dtype=np.int64)
    place[tokens] = np.arange(len(tokens))
    paths = []
    for number in sorted(set(chosen) - {trie.runs[one].parent for one in chosen}):  # the ends of kept paths
        run = trie.runs[number]
        row = run.rows[0]
        keys = rows[row].keys[: run.first + run.length]
        start = rows[row].column
        paths.append(Row(keys, rows[row].position, stored=place[trie.index[row, start : start + len(keys)]]))
    return Prefixes(paths, *_selected(layers, hidden, tokens), then)


@dataclass(frozen=True)
class KeptRows:
    """Last hidden states of all rows of a pass."""

    # [length] each: the rows' tokens among the distinct ones, by the rows' `_name`.
    tokens: dict[tuple[int, bytes], Numbers]
    hidden: Tensor  # [1, tokens, hidden_size] of the distinct tokens
    kind: type  # the class of the decoder's output
    then: ModelThen  # the decoder

    @classmethod
    def of(cls, rows: Sequence[Row], trie: Trie, output: Any, then: ModelThen) -> KeptRows:
        of_rows = zip(rows, trie.index, strict=True)
        tokens = {_name(row): places[row.column : row.column + len(row.keys)] for row, places in of_rows}
        return cls(tokens, output["last_hidden_state"], type(output), then)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        return None  # a copy of the model has other weights

    def index(self, rows: Sequence[Row], width: int) -> Numbers | None:
        """Each place's token, as in `Trie.index`; None if one of the rows is not kept."""
        index: Numbers = np.full((len(rows), width), self.hidden.shape[1], dtype=np.int64)
        for row, places in zip(rows, index, strict=True):
            if (tokens := self.tokens.get(_name(row))) is None:
                return None
            places[row.column : row.column + len(tokens)] = tokens
        return index


def _name(row: Row) -> tuple[int, bytes]:
    return row.position, row.keys.tobytes()


def _selected(layers: Layers, hidden: Tensor, tokens: Numbers) -> tuple[Layers, Tensor]:
    """Keys and values, and hidden states, of some tokens; layers may be on several devices."""
    index = torch.from_numpy(tokens)
    on = {device: index.to(device) for device in {hidden.device, *(keys.device for keys, _ in layers.values())}}
    selected = {
        layer: (keys.index_select(2, on[keys.device]), values.index_select(2, on[keys.device]))
        for layer, (keys, values) in layers.items()
    }
    return selected, hidden.index_select(1, on[hidden.device])
