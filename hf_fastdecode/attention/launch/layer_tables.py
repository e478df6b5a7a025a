"""Tables of a step for all layers of a model: layers that are alike read the same ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ..forest import Forest
from ..kv import SuffixLengths
from .own_nodes import OwnNodes
from .plan import HeadShape
from .step_tables import StepTables, StoredKV


class Alike(NamedTuple):
    """What layers have in common that read the same tables: their heads, and how they attend to long suffixes."""

    shape: HeadShape
    own_nodes: OwnNodes


class TablesByShape:
    """Tables of a step for every layer, see `StepTables`; `layers` has what each has in common with others.

    Args:
        make: Makes the tables of layers that are alike; arguments as for `StepTables`.
    """

    def __init__(
        self,
        rows: int,
        layers: Mapping[int, Alike],
        forest: Forest,
        device: torch.device,
        make: Callable[..., StepTables] = StepTables,
    ):
        self.layers = layers
        self._tables = {
            alike: make(
                rows, [one for one, other in layers.items() if other == alike], forest, device, alike.own_nodes
            )
            for alike in dict.fromkeys(layers.values())
        }

    def of(self, layer: int) -> StepTables:
        """The tables that a layer reads."""
        return self._tables[self.layers[layer]]

    @property
    def own_nodes_dominate(self) -> bool:
        """Whether launch parameters of any layers suit own nodes."""
        return any(alike.own_nodes.dominate for alike in self._tables)

    def fits(self, forest: Forest) -> bool:
        """Whether a batch over this forest fits the tables."""
        return all(tables.fits(forest) for tables in self._tables.values())

    def follow(self, forest: Forest, suffixes: SuffixLengths, stored: Mapping[int, StoredKV]) -> None:
        """Describe a batch's next step, see `StepTables.follow`."""
        for alike, tables in self._tables.items():
            own = {index: one for index, one in stored.items() if self.layers[index] == alike}
            tables.follow(forest, suffixes, own)
