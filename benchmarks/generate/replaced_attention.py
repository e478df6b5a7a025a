"""Other attention in the package's own loop, for the time of a measurement: none at all, or a baseline's.

The package's attention stands in transformers' registry under a name; an entry of the registry's instance goes before
it. Steps captured under another attention must not outlive it: enable the model inside of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_fastdecode.attention.active_passes import ATTENTION_NAME
from hf_fastdecode.attention.interface import shared_context_attention
from hf_fastdecode.attention.kv import ForestKV, Segment, SharedKV
from hf_fastdecode.cache.handles import DecodeKV
from hf_fastdecode.measurement.rows import NotAvailableError

from ..ops.baselines import TwoCalls, bifurcated
from ..ops.inputs import NodeBatch

Attend = Callable[[SharedKV, Tensor, float], Tensor | None]
"""Handle, query ``[rows, heads, queries, head_dim]`` and scale to an output of that shape; None: attend as usual."""


# What layers ask of attention that the papers' ways do not compute.
_NOT_KNOWN = ("softcap", "sliding_window", "s_aux")


class Replaced:
    """Whether an attention function was replaced and then called."""

    called = False


@contextmanager
def replaced_attention(attend: Attend) -> Iterator[Replaced]:
    """Within, shared-context attention is `attend`'s; restored on leaving, also by an error."""
    seen = Replaced()

    def attention(
        module: nn.Module, query: Tensor, key: Any, value: Any, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        scale = kwargs.get("scaling")
        out = None
        if isinstance(key, SharedKV):
            if attend is not no_attention and (
                mask is not None or any(kwargs.get(name) is not None for name in _NOT_KNOWN)
            ):
                raise NotAvailableError(f"{type(module).__name__} has a window, sinks or a soft cap, which it ignores")
            out = attend(key, query, query.shape[-1] ** -0.5 if scale is None else float(scale))
        if out is None:
            return shared_context_attention(module, query, key, value, mask, **kwargs)
        seen.called = True
        return out.transpose(1, 2).contiguous(), None

    # Compiled layers break where they break for what it stands in for.
    attention = torch.compiler.disable(attention)
    # An entry of this very instance is set and deleted: the one that registration made stays where it is.
    if ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is not shared_context_attention:
        raise RuntimeError("attention is replaced already; leave that block first")
    ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] = attention
    try:
        yield seen
    finally:
        del ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]


def no_attention(handle: SharedKV, query: Tensor, scale: float) -> Tensor:
    """The query for an answer: nothing is stored, read or computed (Hydragen, section 4.1, "No Attention")."""
    return query


def bifurcated_attention(handle: SharedKV, query: Tensor, scale: float) -> Tensor | None:
    """Bifurcated's einsums over the one context and the suffixes."""
    if not isinstance(handle, DecodeKV) or handle.step.tables is not None:  # of a captured step
        return None
    nodes = handle.append()
    own = _used(nodes)
    if len(nodes.forest.nodes) != 1 or query.shape[2] != 1:
        raise NotAvailableError(f"Bifurcated attention takes one context and one query a row, got {nodes.forest!r}")
    return bifurcated(query, nodes.node(nodes.forest.nodes[0].span), own, scale)


def hydragen_attention(handle: SharedKV, query: Tensor, scale: float) -> Tensor | None:
    """Hydragen's call for each node, call for the suffixes, and merge."""
    if not isinstance(handle, DecodeKV) or handle.step.tables is not None:  # of a captured step
        return None
    kv = handle.append()
    own = _used(kv)
    if query.shape[2] != 1 or any(sum(node.row_count for node in level) < len(query) for level in kv.forest.levels):
        raise NotAvailableError(f"two calls take one query a row and levels over all rows, got {kv.forest!r}")
    levels = [
        [NodeBatch(node.row_start, node.row_stop, *(part[None] for part in kv.node(node.span))) for node in level]
        for level in kv.forest.levels
    ]
    return TwoCalls("flash", pack=False)(query, levels, own, scale)


def _used(kv: ForestKV) -> Segment:
    """The suffixes' tokens, ``[rows, kv_heads, length, head_dim]`` each."""
    _, length = kv.suffix_bounds
    return Segment(kv.suffix.keys[:, :, :length], kv.suffix.values[:, :, :length])


REPLACEMENTS: dict[str, Attend] = {
    "none": no_attention,
    "bifurcated": bifurcated_attention,
    "hydragen": hydragen_attention,
}
