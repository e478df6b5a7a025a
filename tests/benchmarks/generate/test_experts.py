"""Experts that steps read, counted by passes over drawn tokens, beside those of transformers' own steps."""

from unittest import mock

import pytest
import torch

from benchmarks.generate import measure
from benchmarks.generate.calls import load
from benchmarks.generate.cases import GenerateCase, PromptTree
from benchmarks.generate.experts import experts_of_steps, mixtures_of, read_bytes
from benchmarks.generate.inputs import TokenIds
from hf_fastdecode.measurement import shapes

from .tiny_case import CPU

MOE = shapes._shape(512, 128, 256, 2, 4, 2, model_type="qwen3_moe", head_dim=32, moe_intermediate_size=64)


@pytest.mark.parametrize("case", [GenerateCase("tiny-moe", 40, 9, 6), PromptTree(8, 3, 20, 3).case("tiny-moe", 6)])
def test_experts_are_those_of_steps(case, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny-moe", MOE | {"num_local_experts": 16, "num_experts_per_tok": 2})
    model = load("tiny-moe", CPU, torch.float32)
    prompts, taken = TokenIds().arguments(model, case), []
    layers = mixtures_of(model)
    handles = [layer.register_forward_pre_hook(lambda _, args: taken.append(args[1])) for layer in layers]
    per_prompt = case.samples // case.prompts
    out = model.generate(**prompts, do_sample=True, top_k=0, num_return_sequences=per_prompt, max_new_tokens=6)
    for handle in handles:
        handle.remove()
    steps = [[len(taken[len(layers) * step + layer].unique()) for step in range(1, 6)] for layer in range(2)]
    counts = experts_of_steps(model, prompts["input_ids"], out[:, -6:])
    assert counts.tolist() == steps and counts.min() > 2 and counts.max() <= 16


def test_bytes_of_chosen_experts_and_all_other_weights(monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny-moe", MOE | {"num_local_experts": 16, "num_experts_per_tok": 2})
    model = load("tiny-moe", CPU, torch.float32)
    whole = sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes
    expert = (2 * 64 * 128 + 128 * 64) * 4
    counts = torch.tensor([[16, 16], [4, 6]])
    assert read_bytes(model, counts) == whole - 11 * expert


def test_rows_say_what_steps_read(bench, monkeypatch):
    monkeypatch.setitem(shapes.SHAPES, "tiny-moe", MOE | {"num_local_experts": 16, "num_experts_per_tok": 2})
    monkeypatch.setattr(type(bench), "_copy_rate", 1e9)
    row = bench.measure(GenerateCase("tiny-moe", 40, 9, 6, "float32"), "shared+min_saved_tokens=1")
    assert row["of_experts"] == 16 and 2 < row["experts"] <= 16
    model = load("tiny-moe", CPU, torch.float32)
    assert 0 < row["weights_floor_ms"] * 1e6 <= sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(measure, "experts_of_steps", mock.Mock(side_effect=torch.OutOfMemoryError))
    row = bench.measure(GenerateCase("tiny-moe", 40, 9, 6, "float32"), "shared+min_saved_tokens=1")
    assert (row["status"], row["experts"]) == ("ok", None) and row["total_s"] > 0
