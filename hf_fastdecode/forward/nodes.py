"""The trie of a forward pass's rows, as attention reads it: nodes of tokens, each with the one before it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple


class Node(NamedTuple):
    """A run of tokens that lie end to end among all keys.

    Attributes:
        start: Its first token's index among the keys.
        length: Its tokens, at least 1.
        parent: Index of the node that it continues; -1 for none.
    """

    start: int
    length: int
    parent: int


class Tree:
    """Nodes in depth-first order, parents first, end to end: a token sees its node up to itself, and all of its
    node's ancestors.

    Args:
        nodes: All nodes.
        kept: Tokens of the first nodes, whose keys an earlier pass has stored; they have no queries.

    Attributes:
        plans: What operators derive from the nodes, kept by their keys, for all layers of the pass.
    """

    def __init__(self, nodes: tuple[Node, ...], kept: int = 0):
        self.nodes, self.kept = nodes, kept
        self.plans: dict[Hashable, Any] = {}
