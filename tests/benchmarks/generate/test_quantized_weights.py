"""Shapes with quantized weights: their names, how they are checked, and what is not installed."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations import finegrained_fp8

from benchmarks.generate import quantized
from benchmarks.generate.calls import check_way, load, small_case
from benchmarks.generate.measure import GenerateBench
from benchmarks.generate.shapes import QUANTIZED, given_of, split_shape
from benchmarks.generate.ways import find_way

from .tiny_case import CASE, CPU

EAGER = find_way("eager+min_saved_tokens=64")


@pytest.fixture
def fp8(monkeypatch):
    """The Hub's product by PyTorch, which leaves activations as they are."""

    def product(x, weight, scales, block_size=None, bias=None, *_, **others):
        rows, columns = weight.shape
        of_elements = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return F.linear(x.float(), weight.float() * of_elements, bias).to(x.dtype)

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", product)
    monkeypatch.setitem(quantized.QUANTIZERS, "fp8", quantized.QUANTIZERS["fp8"]._replace(requires=(), in_fp32=True))


def test_names():
    assert QUANTIZED.keys() == quantized.QUANTIZERS.keys()
    assert split_shape("8b-gqa:bnb-4bit") == ("8b-gqa", "bnb-4bit")
    assert split_shape("8b-gqa") == ("8b-gqa", None)
    assert split_shape("folder:of/a-model") == ("folder:of/a-model", None)
    assert small_case("qwen3-vl-2b:fp8").shape == "tiny-qwen3-vl:fp8"
    assert small_case("gpt-oss-20b:mxfp4").shape == "tiny-experts:mxfp4"
    assert given_of("whisper-large-v3:fp8") is given_of("whisper-large-v3")


def test_linear_layers_are_quantized(fp8):
    model, plain = load("tiny:fp8", CPU, torch.float32), load("tiny", CPU, torch.float32)
    kinds = [type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert kinds.count("FP8Linear") == 14 and kinds.count("Linear") == 1  # the head
    parts = [one.model.layers[0].mlp.down_proj.weight.detach() for one in (quantized.dequantized(model), plain)]
    assert 0 < float((parts[0] - parts[1]).abs().max()) <= float(parts[1].abs().max()) / 16


def test_ways_are_checked_with_such_weights(fp8, monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        assert check_way(EAGER, CPU, dtype, small_case("tiny:fp8")) is None
    whole = finegrained_fp8.fp8_linear

    def of_one_row(x, *rest, **others):
        return whole(x, *rest, **others) * (1 + (x.shape[0] == 1))

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", of_one_row)
    assert check_way(EAGER, CPU, torch.float32, small_case("tiny:fp8")).startswith("wrong: other tokens than stock")


def test_what_is_not_installed(monkeypatch):
    monkeypatch.setitem(
        quantized.QUANTIZERS, "fp8", quantized.QUANTIZERS["fp8"]._replace(requires=("no-such-package",))
    )
    bench = GenerateBench(CPU, repeats=1)
    row = bench.measure(replace(CASE, shape="tiny:fp8"), "stock")
    assert row["status"] == "not run: no-such-package is not installed; pip install no-such-package"
    row = GenerateBench(CPU, check=False).measure(replace(CASE, shape="tiny:mxfp4"), "stock")
    assert row["status"].startswith("not run: ")
