"""The tree of a packed row: runs of distinct tokens, each after the tokens of its ancestors."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Node(NamedTuple):
    """A run of tokens that the same rows share.

    Attributes:
        start: Its first token among those of all nodes.
        length: Number of tokens, at least 1.
        parent: Index of the node before it in its rows; -1 if it begins them.
    """

    start: int
    length: int
    parent: int

    @property
    def stop(self) -> int:
        """The end of its tokens."""
        return self.start + self.length


@dataclass(frozen=True, eq=False)
class Tree:
    """Nodes whose tokens lie end to end, each after its parent; new ones in depth-first order.

    A token sees its own node up to itself, and all tokens of the node's ancestors.

    Attributes:
        nodes: The first begins at token 0.
        kept: The first so many tokens, of whole nodes, have keys and values of an earlier pass, and no queries.
        plans: What is computed once for all layers, by what it depends on.
    """

    nodes: tuple[Node, ...]
    kept: int = 0
    plans: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @property
    def tokens(self) -> int:
        """Tokens of all nodes."""
        return self.nodes[-1].stop if self.nodes else 0
