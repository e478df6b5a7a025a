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
from ...attention.launch.step_tables import Attention, attend_nothing
from ...kernels.ahead import compile_in_background
from ..decoding.sampling import compile_sampler
from .cuda_graph import bucket

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
