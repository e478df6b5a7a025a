"""Kernels begin to compile before they are needed: those that other calls need, also where something is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import hf_fastdecode as fd
from hf_fastdecode.generation.steps import modes

from ..fresh_processes import ROOT
from ..tiny_models import ragged_prompts, seeded, tiny_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
def test_an_output_layer_without_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of quantized models, some of whose layers store no tensor of that name."""
    pytest.importorskip("triton")
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    model = tiny_model("llama-gqa")
    model.lm_head = nn.Sequential(model.lm_head)
    call = ragged_prompts(41) | {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 3}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, mode="graph", backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)


def test_steps_of_every_size_find_their_kernels_begun() -> None:
    """In an interpreter of its own, where Triton compiles; see `every_size`."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.generation.every_size"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"7b-mha": [], "8b-gqa": []}
