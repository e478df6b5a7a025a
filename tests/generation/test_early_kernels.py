"""Kernels that begin to compile before they are needed: while prompts are prefilled."""

from __future__ import annotations

import pytest
from torch import nn

pytest.importorskip("triton")

import hf_fastdecode as fd
from hf_fastdecode.generation.steps import prefill_passes

from ..tiny_models import ragged_prompts, tiny_model
from .calls import as_in_stock
from .uncaptured import SAMPLING, SMALL, on_the_cpu


@on_the_cpu
def test_an_output_layer_without_a_weight(uncaptured: None) -> None:
    """As of quantized models, some of whose layers store no tensor of that name."""
    model = tiny_model("llama-gqa")
    model.lm_head = nn.Sequential(model.lm_head)
    call = ragged_prompts(41) | {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 3}
    as_in_stock(model, lambda: model.generate(**call), mode="graph", backend="triton")


@on_the_cpu
def test_they_begin_once_for_the_rows_of_a_step(uncaptured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other rows wait, and for rows that a captured step of a few more takes."""
    rows = list[int]()
    monkeypatch.setattr(prefill_passes, "_attend", lambda store, forest, *_, **__: rows.append(forest.rows))
    monkeypatch.setattr(prefill_passes, "compile_in_background", lambda run, device: run())
    model = tiny_model("llama-gqa", **SMALL)
    with fd.enabled(model, mode="graph", backend="triton", max_rows=6):
        for samples in (16, 16, 5, 2):
            model.generate(**ragged_prompts(41), **SAMPLING | {"num_return_sequences": samples, "max_new_tokens": 3})
    assert rows == [6, 2]
