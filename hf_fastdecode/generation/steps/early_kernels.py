"""Begins to compile, while a model's first prompts are prefilled, the kernels that the steps after them will launch.

They are found by launches over empty tensors, which do not take place (`kernels.ahead`). Kernels that are not found
are compiled when a step is captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ...attention.forest import Forest
from ...attention.kv import Scoring, SuffixLengths
from ...attention.launch.plan import HeadShape, choose_own_nodes
from ...attention.launch.step_tables import RestTables, StepTables
from ...attention.partial import unwritten_partial
from ...cache.layers.expanded import CapturedExpandedKV
from ...cache.layers.latent import ExpandedNodes, Widths
from ...cache.stores import Kind, Store
from ...kernels.ahead import compile_in_background
from ..decoding.sampling import compile_sampler
from .captured_step import bucket
from .expansion import paying_nodes, runs_of

if TYPE_CHECKING:
    from ..call_context import CallContext


def begin_compiling_sampler(call: CallContext, processors: LogitsProcessorList, prompts: Tensor) -> None:
    """Begin to compile the sampling kernel for a call's processors; prompts are ``[rows, width]``."""
    head = call.model.get_output_embeddings()
    if not _is_first_capture(call) or head is None:
        return
    dtype, device = call.model.dtype, call.model.device

    def launch() -> None:  # where weights are quantized it may find none
        logits = torch.empty(1, head.weight.shape[0], dtype=dtype, device=device)
        compile_sampler(call.options.sampler, processors, call.config, prompts, logits)

    compile_in_background(launch, device)


def begin_compiling_attention(call: CallContext, forest: Forest) -> None:
    """Begin to compile the decode kernels for steps over a forest."""
    if not _is_first_capture(call) or call.structure.parallel is not None:  # whose steps launch others
        return
    model, layout = call.model, call.structure.layout
    steps = int(call.config.max_length) - max(forest.context_lengths, default=0)
    made_of = next(iter(layout.expanding.values()), None)

    def launch() -> None:
        attended, merged = forest, False
        if made_of is not None and (wanted := paying_nodes(forest, steps)):
            split = ExpandedNodes(runs_of(node.span for node in wanted), {}, 1).split(forest)
            attended, merged = split.as_stored, True
            _attend_expanded(
                next(iter(layout.distinct)), Widths.of(made_of), split.expanded, model.dtype, model.device
            )
        for store in layout.distinct:
            if store.kv_heads and (store.head_dim == store.value_dim or store.kind is Kind.LATENT):
                _attend(store, attended, model.dtype, model.device, merged=merged)

    compile_in_background(launch, model.device)


def _is_first_capture(call: CallContext) -> bool:
    return call.mode != "eager" and not call.state.captures.made


def _attend(store: Store, forest: Forest, dtype: torch.dtype, device: torch.device, *, merged: bool = False) -> None:
    """Launch the kernels of a layer's captured step over a forest, for launches that are left out.

    With `merged`, what they compute is merged with expanded nodes.
    """
    rows, heads, kv_heads = bucket(forest.rows), store.kv_heads * store.group_size, store.kernel_heads
    rest = store.head_dim - store.value_dim  # of latents
    query = torch.empty(rows, heads, 1, store.head_dim, dtype=dtype, device=device)
    keys = torch.empty(rows, kv_heads, 1, store.value_dim, dtype=dtype, device=device)
    values = torch.empty(rows, kv_heads, 1, rest, dtype=dtype, device=device) if rest else keys
    scoring = Scoring(1.0)
    own_nodes = choose_own_nodes(rows, HeadShape.of(query, keys, scoring), device, dominate=False)
    tables = StepTables(rows, [0], forest, device, own_nodes)
    tables.follow(forest, SuffixLengths(), {})
    into = unwritten_partial(query, store.value_dim) if merged else None
    tables.attend(0, query, keys, values, scoring, into=into)


def _attend_expanded(store: Store, widths: Widths, forest: Forest, dtype: torch.dtype, device: torch.device) -> None:
    """The same of nodes with latents that are read as keys and values."""
    rows, heads = bucket(forest.rows), store.query_heads
    query = torch.empty(rows, heads, 1, widths.key + widths.rotated, dtype=dtype, device=device)
    own = unwritten_partial(query, widths.value)
    tables = RestTables(widths.rotated, rows, [0], forest, device)
    tables.follow(forest, SuffixLengths(), {})
    CapturedExpandedKV(tables, 0, widths).attend(query, Scoring(1.0), own)
