"""Begins to compile kernels before they are needed, found by launches that do not take place (`kernels.ahead`).

While a model's first prompts are prefilled: those of the steps after them. Once the first step is captured: those of
captures that later calls are likely to need, of other numbers of rows and other lengths, in a process of its own.
Kernels that are not found are compiled when a step is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ...attention.forest import Forest, Node, Span
from ...attention.launch.step_tables import Attention, attend_nothing
from ...kernels.ahead import compile_in_background, listed
from ...kernels.compiling_process import CompilingProcess
from ...kernels.noted import Note
from ..decoding.sampling import compile_sampler
from .cuda_graph import bucket

if TYPE_CHECKING:
    from ..call_context import CallContext

logger = logging.getLogger("hf_fastdecode")


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
    if not _is_first_capture(call):
        return
    model, stores = call.model, call.structure.layout.distinct

    def launch() -> None:
        for store in stores:
            if store.kv_heads and store.head_dim == store.value_dim:
                asked = Attention(store.kv_heads, store.group_size, 1, store.head_dim, model.dtype)
                attend_nothing(asked, bucket(forest.rows), forest, device=model.device)

    compile_in_background(launch, model.device)


def _is_first_capture(call: CallContext) -> bool:
    return call.mode != "eager" and not call.state.captures.made


_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_SHORT, _LONG = 512, 32768
"""Tokens of contexts for which launch parameters of short and of long ones are chosen."""


def compile_other_sizes(
    process: CompilingProcess, notes: Iterable[Note], forest: Forest, device: torch.device
) -> None:
    """Begin to compile the kernels of captures of other sizes than the first, the most likely first.

    Args:
        process: Does it.
        notes: What a step asks kernels for.
        forest: Of the first captured step.
    """
    try:
        with torch.cuda.device(device):
            process.compile(listed(lambda: launch_other_sizes(notes, forest)))
    except Exception as error:
        logger.debug("kernels of other sizes are compiled when they are launched: %s", error)
        process.end()


def launch_other_sizes(notes: Iterable[Note], forest: Forest) -> None:
    """Launch what steps of other sizes than a forest's would: first those of about as many rows."""
    notes, now = list(notes), bucket(forest.rows)
    longest = max(forest.context_lengths, default=0)
    sizes = sorted(_ROWS, key=lambda rows: (max(rows / now, now / rows), -rows))
    for rows in sizes:
        for tokens in (longest, _LONG, _SHORT):
            for ask, of_nodes in notes:
                if of_nodes or tokens == longest:
                    ask(rows, _shared_by_all(rows, tokens, len(forest.levels)))
    for rows in sizes:
        for ask, of_nodes in notes:
            if of_nodes:
                ask(rows, Forest(rows, [Node(Span(row, 0, _SHORT), row, 1) for row in range(rows)]))


def _shared_by_all(rows: int, tokens: int, levels: int) -> Forest:
    """Contexts of so many tokens in so many levels of nodes."""
    each = max(1, tokens // max(1, levels))
    return Forest(rows, [Node(Span(depth, 0, each), 0, rows, depth) for depth in range(levels)])
