"""Kernels that begin to compile before they are needed: while prompts are prefilled."""

from __future__ import annotations

import threading

import pytest
from torch import nn

pytest.importorskip("triton")

import hf_fastdecode as fd
from benchmarks.generate.calls import compilations
from hf_fastdecode.attention.forest import Forest
from hf_fastdecode.generation.steps import prefill_passes
from hf_fastdecode.kernels import ahead
from hf_fastdecode.kernels.row_products import api

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


@on_the_cpu
def test_those_of_other_rows_begin_after_the_first_capture(uncaptured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a model, the next larger first, of one prompt and of several."""
    rows = list[tuple[int, int]]()
    model = tiny_model("llama-gqa", **SMALL)

    def attend(store: object, forest: Forest, *_: object, **__: object) -> None:
        rows.append((forest.rows, len(forest.nodes)))

    monkeypatch.setattr(prefill_passes, "compile_in_background", lambda run, device: None)
    monkeypatch.setattr(prefill_passes, "compile_beside", lambda run, device: run())
    monkeypatch.setattr(prefill_passes, "_attend", attend)
    monkeypatch.setattr(api, "launch_for_rows", lambda rows, device: None)
    call = ragged_prompts(41) | SAMPLING | {"max_new_tokens": 3}
    with fd.enabled(model, mode="eager", backend="triton"):
        model.generate(**call)
    assert not rows
    with fd.enabled(model, mode="graph", backend="triton", max_rows=12):
        for samples in (12, 3):
            model.generate(**call | {"num_return_sequences": samples})
    assert rows == [(16, 2), (16, 1), (1, 1), (8, 1)]


@pytest.mark.gpu
def test_another_number_of_rows_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(ahead, "_THREADS_BESIDE", 2)
    model = tiny_model("llama-gqa").half().cuda()
    call = {name: tensor.cuda() for name, tensor in ragged_prompts(41).items()} | SAMPLING | {"max_new_tokens": 3}
    with fd.enabled(model, mode="graph"), knobs.compilation.scope():
        knobs.compilation.always_compile = True  # also what is on disk
        model.generate(**call | {"num_return_sequences": 2})
        while threads := [thread for thread in threading.enumerate() if thread.name == "hf_fastdecode_compile"]:
            threads[0].join()
        with compilations() as compiled:
            model.generate(**call | {"num_return_sequences": 21})
    assert not compiled
