"""Tables of nodes whose keys go on in numbers that all KV heads share, and that are stored apart, once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from .kernel_call import AddressesOfLayers, rest_addresses
from .step_tables import StepTables, StoredKV


class StoredWithRests(StoredKV, Protocol):
    """Storage of one layer's nodes.

    Attributes:
        rests: What all KV heads share of keys, ``[1, tokens, rest]`` by segment.
    """

    @property
    def rests(self) -> Mapping[int, Tensor]: ...


class RestTables(StepTables):
    """Tables for nodes alone; further arguments as for `StepTables`, whose layers are `StoredWithRests`.

    Args:
        rest: Numbers of a key that all KV heads share; the last ones.
    """

    _lines: ClassVar[int] = 4

    def __init__(self, rest: int, *args: Any):
        self.rest = rest
        super().__init__(*args)

    def _node_addresses(self, addresses: AddressesOfLayers, stored: Any) -> Tensor:
        given: StoredWithRests = stored
        of_rests = rest_addresses(self.forest, given.rests)
        return torch.cat([super()._node_addresses(addresses, given), of_rests[None]])
