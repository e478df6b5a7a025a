"""Shapes whose calls are given more than token ids, tiny and on the CPU: an encoder's input, an image in a text."""

import pytest
import torch

from benchmarks.generate import ways as replacing
from benchmarks.generate.calls import caller, check_way, load, logits_error, small_case
from benchmarks.generate.cases import GenerateCase, PromptTree
from benchmarks.generate.shapes import INPUT_SHAPES, given_of
from benchmarks.generate.ways import find_way
from hf_fastdecode.errors import InputError

from .tiny_case import CPU

SAMPLES, NEW = 5, 9
CASES = {
    shape: GenerateCase(shape, one.context, SAMPLES, NEW, "float32")
    for shape, one in INPUT_SHAPES.items()
    if shape == one.small
}
OF_DECODERS = {"tiny-whisper": 4, "tiny-t5": 1, "tiny-qwen3-vl": 120, "tiny-gemma3-image": 120}
"""Tokens of prompts."""
PER_TOKEN = 2 * 2 * 128 * 4  # of encoder-decoders: K and V, layers, width, bytes


@pytest.fixture(scope="module")
def rows(bench):
    """Measured columns by shape and way; ours have been checked, and their tokens compared with stock's."""
    return {
        (shape, way): bench.measure(case, way)
        for shape, case in CASES.items()
        for way in ("stock", "shared", "stock-beams", "beams")
    }


def test_every_way_runs(rows):
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["ran"] for (_, way), row in rows.items() if not way.startswith("stock")} == {"eager, sampler hf"}


@pytest.mark.parametrize("shape", CASES)
def test_prompts_are_embedded_once(rows, shape):
    prompt = OF_DECODERS[shape]
    for stock, ours in (("stock", "shared"), ("stock-beams", "beams")):
        assert rows[shape, stock]["embedded_tokens"] == SAMPLES * (prompt + NEW - 1)
        once = prompt + SAMPLES * (NEW - 1)
        assert rows[shape, ours]["embedded_tokens"] in (once, once + 1)  # a placeholder, to be compared with others


@pytest.mark.parametrize("shape", ["tiny-whisper", "tiny-t5"])
def test_bytes_of_caches_count_encoded_tokens(rows, shape):
    stock, shared = rows[shape, "stock"], rows[shape, "shared"]
    prompt = OF_DECODERS[shape]
    assert stock["kv_bytes"] == SAMPLES * (200 + prompt + NEW - 1) * PER_TOKEN
    assert shared["floor_kv_bytes"] == stock["floor_kv_bytes"] == (200 + prompt + SAMPLES * NEW) * PER_TOKEN
    assert shared["kv_bytes"] in (shared["floor_kv_bytes"], shared["floor_kv_bytes"] - SAMPLES * PER_TOKEN)


def test_bytes_of_caches_that_are_not_returned(rows):
    assert rows["tiny-whisper", "stock-beams"]["kv_bytes"] is None  # the best beam's is
    image = rows["tiny-qwen3-vl", "shared"]
    assert image["kv_bytes"] == image["floor_kv_bytes"] - SAMPLES * (2 * 2 * 64 * 4)  # but for the last tokens


@pytest.mark.parametrize("shape", CASES)
def test_logits_in_half_precision(shape):
    case = small_case(shape)
    assert case.shape == shape
    assert 0 < logits_error(find_way("eager"), CPU, torch.bfloat16, case) <= 2


@pytest.mark.parametrize("shape", ["tiny-whisper", "tiny-qwen3-vl"])
def test_wrong_attention_is_found(shape, monkeypatch):
    monkeypatch.setattr(replacing.GenerateWay, "exact", True)
    red = check_way(find_way("eager-no-attention"), CPU, torch.float32, small_case(shape))
    assert red == "wrong: other tokens than stock in fp32 on cpu"
    assert logits_error(find_way("eager-no-attention"), CPU, torch.bfloat16, small_case(shape)) > 10


def test_a_check_of_a_call_that_runs_stock_is_not_green():
    red = check_way(find_way("eager+min_saved_tokens=100000"), CPU, torch.float32, small_case("tiny-t5"))
    assert red.startswith("not run: it ran stock: sharing would save ")


def test_a_small_shape_is_of_the_same_kind():
    for shape, one in INPUT_SHAPES.items():
        small = INPUT_SHAPES[one.small]
        assert (small.model_type, type(small.given)) == (one.model_type, type(one.given)), shape
        assert small.small == one.small


BILLIONS = {"whisper-large-v3": 1.5, "t5-3b": 2.9, "qwen3-vl-2b": 2.1, "gemma3-12b-image": 12.2}


def test_sizes_of_shapes():
    """The published numbers of weights."""
    sizes = {shape: round(one.parameters() / 1e9, 1) for shape, one in INPUT_SHAPES.items() if shape not in CASES}
    assert sizes == BILLIONS


def test_whisper_makes_one_call_of_its_recording():
    """Random weights would draw timestamps, at which its `generate` would begin anew."""
    model, case = load("tiny-whisper", CPU, torch.float32), CASES["tiny-whisper"]
    assert len(given_of(case.shape).arguments(model, case)["input_features"]) == 1
    tokens = caller(model, case, find_way("stock"))(40)
    assert tokens.shape == (SAMPLES, 40)
    assert tokens.max() < model.generation_config.no_timestamps_token_id


def test_trees_are_not_for_encoders():
    for shape in ("whisper-large-v3", "t5-3b"):
        with pytest.raises(InputError, match=f"`tree` is of token ids alone, {shape} is given more; name a `point`"):
            given_of(shape).check(PromptTree(8, 2, 8, 2).case(shape, 8))


@pytest.mark.parametrize("shape", ["tiny-qwen3-vl", "tiny-gemma3-image"])
def test_prompts_of_a_tree_have_images_of_their_own(bench, shape):
    case = PromptTree(1, 3, 119, 2).case(shape, 4, "float32")
    stock, shared = (bench.measure(case, way) for way in ("stock", "shared+min_saved_tokens=1"))
    assert stock["status"] == shared["status"] == "ok"
    assert stock["embedded_tokens"] == 6 * 123 > 2 * (shared["embedded_tokens"] - 3 * 120)
    assert shared["embedded_tokens"] >= 3 * 120  # with other images nothing else is shared
    pixels = given_of(shape).arguments(load(shape, CPU, torch.float32), case)["pixel_values"].chunk(3)
    assert not any(torch.equal(pixels[0], other) for other in pixels[1:])
    with pytest.raises(InputError, match="have images of their own after 16 tokens; share at most these"):
        given_of(shape).check(PromptTree(17, 3, 103, 2).case(shape, 4))
