"""Kernels that begin to compile before they are needed: while prompts are prefilled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_fastdecode.generation.steps import modes

from ..tiny_models import ragged_prompts, tiny_model
from .calls import as_in_stock


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_an_output_layer_without_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of quantized models, some of whose layers store no tensor of that name."""
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    model = tiny_model("llama-gqa")
    model.lm_head = nn.Sequential(model.lm_head)
    call = ragged_prompts(41) | {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 3}
    as_in_stock(model, lambda: model.generate(**call), mode="graph", backend="triton")
