"""Captured prefill passes: on a GPU in graphs; here the same padded passes over the same buffers, uncaptured."""

import logging
from dataclasses import replace

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.forest import Span
from hf_fastdecode.attention.launch import kernel_call as prefill
from hf_fastdecode.attention.launch import plan
from hf_fastdecode.cache.state import PrefillItem
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import captured_prefill, modes
from hf_fastdecode.generation.steps.captured_prefill import CapturedPrefill, CapturedPrefills, PrefillShape

from ..tiny_models import ARCHITECTURES, ragged_prompts, seeded, tiny_model

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode.config import Config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
FIRST_TOKEN = {
    **{"num_return_sequences": 2, "do_sample": True, "top_k": 0, "max_new_tokens": 1},
    **{"return_dict_in_generate": True, "output_logits": True},
}
# Interpreting contexts takes time by the program, one for each layer, token and KV head: as many heads of a group.
SMALL = {
    "llama-gqa": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
    "llama-mha": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
    "gpt2": {"n_layer": 1, "n_head": 2},
}
OPTIONS = {"backend": "triton", "min_saved_tokens": 1, "min_shared_tokens": 8}


@pytest.fixture
def uncaptured(monkeypatch):
    """Let captured passes run where there is no GPU, from the first call on."""
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    monkeypatch.setattr(captured_prefill, "_PASSES_THAT_PAY_A_CAPTURE", {True: 1, False: 1})


def first_token(model, prompt, **given):
    """The output of a call for one token, and how many tokens captured passes have prefilled."""
    output = model.generate(**prompt, **FIRST_TOKEN, **given)
    return output, fd.explain(model).last_call.captured_prefill_tokens


ROUNDING = 16 * torch.finfo(torch.float32).eps
"""Of the largest value. Products over padded tokens sum in another order, which one by the CPU: up to 9 were seen."""


def assert_same_prefill(one, other):
    """Compare the logits after the prompts, and all keys and values of nodes."""
    assert torch.allclose(one.logits[0], other.logits[0], rtol=0, atol=ROUNDING * one.logits[0].abs().max())
    ours, theirs = one[CACHE], other[CACHE]
    assert ours.forest == theirs.forest
    for left, right in zip(ours.attention_layers, theirs.attention_layers, strict=True):
        assert left.storage.segments.keys() == right.storage.segments.keys()
        for number, segment in left.storage.segments.items():
            for made, expected in zip(segment, right.storage.segments[number], strict=True):
                assert made.shape == expected.shape
                assert torch.allclose(made, expected, rtol=0, atol=ROUNDING * expected.abs().max())


def compare_with_eager(model, prompts, **options):
    """Prefill each of the prompts by captured passes, in turn, and compare with eager ones; the counts of tokens."""
    with fd.enabled(model, mode="eager", **OPTIONS | options):
        eager = [first_token(model, prompt)[0] for prompt in prompts]
    with fd.enabled(model, mode="graph", **OPTIONS | options):
        captured = [first_token(model, prompt) for prompt in prompts]
        made = state_of(model).captures.prefills.count
    for expected, (found, _) in zip(eager, captured, strict=True):
        assert_same_prefill(found, expected)
    return [count for _, count in captured], made


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "llama-mqa", "gpt2"])
def test_one_prompt_of_any_length(name, uncaptured):
    lengths = [2, 15, 63, 64, 65, 127, 128, 129, 64, 350]
    counts, made = compare_with_eager(tiny_model(name), [ragged_prompts(n, seed=n) for n in lengths])
    assert counts == lengths
    assert made == 4  # 64, 128, 192 and 384 tokens


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "gpt2"])
def test_several_prompts_do_not_see_each_other(name, uncaptured):
    prompts = [ragged_prompts(20, 33, 7), ragged_prompts(31, 9, 22, seed=1), ragged_prompts(16, 16, 16, seed=2)]
    counts, made = compare_with_eager(tiny_model(name), prompts)
    assert counts == [60, 62, 48]
    assert made == 1


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha", "gpt2"])
def test_prompts_with_a_common_beginning(name, uncaptured):
    """The beginning in one pass, then all ends in another, over the beginning's stored keys and values."""
    prompts = [ragged_prompts(41, 36, shared=30), ragged_prompts(57, 33, shared=32, seed=1)]
    small = SMALL[name] if name != "llama-gqa" else {}
    counts, made = compare_with_eager(tiny_model(name, **small), prompts)
    assert counts == [47, 58]
    assert made == 2  # without and with contexts


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_chunks_of_a_prompt_fill_one_segment(name, uncaptured):
    model, prompts = tiny_model(name, **SMALL[name]), [ragged_prompts(100), ragged_prompts(75)]
    counts, _ = compare_with_eager(model, prompts, max_prefill_tokens=32)
    assert counts == [100, 75]


NOT_HERE = ("llama-gqa", "llama-mha", "llama-mqa", "gpt2", "mimo_v2_flash")  # tested above; steps are not captured


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NOT_HERE])
def test_every_architecture_within_its_windows(name, uncaptured):
    """One prompt, and several: soft caps, sinks, biases, experts, layers that differ."""
    prompts = [ragged_prompts(30), ragged_prompts(27, seed=1), ragged_prompts(13, 9, 14)]
    counts, made = compare_with_eager(tiny_model(name), prompts)
    assert counts == [30, 27, 36]
    assert made == 2


def test_rows_that_outgrow_a_window_are_prefilled_eagerly(uncaptured):
    """By what they generate too, as eager prefill does."""
    model = tiny_model("mistral-window")  # of 40 tokens
    with fd.enabled(model, mode="graph", **OPTIONS):
        counts = [
            first_token(model, ragged_prompts(39))[1],
            first_token(model, ragged_prompts(39), min_new_tokens=1)[1],
            first_token(model, ragged_prompts(41))[1],
        ]
        assert counts == [39, 39, 0]
        model.generate(**ragged_prompts(39), max_new_tokens=2)
        assert fd.explain(model).last_call.captured_prefill_tokens == 0


@pytest.mark.parametrize("name", ["mistral-window", "gemma2"])
def test_windows_and_soft_caps_by_the_kernel(name, uncaptured, monkeypatch):
    """Rows that outgrow a window, of one prompt and of several."""
    model = tiny_model(name, num_hidden_layers=2, sliding_window=20)
    prompts = [ragged_prompts(30), ragged_prompts(27, 13, 24)]
    with fd.enabled(model, mode="eager", **OPTIONS):
        eager = [first_token(model, prompt)[0] for prompt in prompts]
    monkeypatch.setattr(prefill, "on_gpu", lambda _: True)
    with fd.enabled(model, mode="graph", **OPTIONS):
        for prompt, expected in zip(prompts, eager, strict=True):
            found, count = first_token(model, prompt)
            assert count == prompt["attention_mask"].sum(), fd.explain(model).last_call.prefill_reason
            assert_same_prefill(found, expected)
            assert "causal attention by triton, merged with its context, captured" in str(
                fd.explain(model).last_call.lines()
            )


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha"])
def test_later_calls_over_kept_prompts(name, uncaptured):
    """New tokens over stored contexts, of one node and of several, and a whole prompt that is stored."""
    model = tiny_model(name, **SMALL[name])
    whole = ragged_prompts(120)
    begin = [{key: part[:, :length] for key, part in whole.items()} for length in (70, 90, 101, 101, 120)]
    call = {"do_sample": True, "top_k": 0, "max_new_tokens": 2}
    stock = [seeded(lambda prompt=prompt: model.generate(**prompt, **call)) for prompt in begin]
    counts = []
    with fd.enabled(model, mode="graph", reuse_prefix=True, **OPTIONS):
        for prompt, expected in zip(begin, stock, strict=True):
            assert torch.equal(seeded(lambda prompt=prompt: model.generate(**prompt, **call)), expected)
            counts.append(fd.explain(model).last_call.captured_prefill_tokens)
    assert counts == [70, 20, 11, 0, 19]


def test_the_last_token_of_a_stored_prompt_is_a_captured_step(uncaptured, monkeypatch):
    def feed(*args):
        raise AssertionError("an eager step")

    monkeypatch.setattr(modes.EagerSteps, "feed", feed)
    model, prompt = tiny_model(num_hidden_layers=1), ragged_prompts(70)
    with fd.enabled(model, mode="graph", reuse_prefix=True, **OPTIONS):
        first, again = (first_token(model, prompt)[0].logits[0] for _ in range(2))
        assert fd.explain(model).last_call.prefilled_tokens == 0
    assert torch.allclose(first, again, atol=1e-5)


def test_a_shape_is_captured_when_it_comes_again(uncaptured, monkeypatch):
    monkeypatch.setattr(captured_prefill, "_PASSES_THAT_PAY_A_CAPTURE", {True: 2})
    model, counts = tiny_model(num_hidden_layers=1), []
    with fd.enabled(model, mode="graph", **OPTIONS):
        for length in (60, 70, 50, 64, 2, 129):
            counts.append(first_token(model, ragged_prompts(length))[1])
        assert counts == [0, 0, 50, 64, 2, 0]
        assert "of these, by captured passes" not in str(fd.explain(model).last_call.lines())
        first_token(model, ragged_prompts(64))
        assert "of these, by captured passes: 64" in str(fd.explain(model).last_call.lines())
        assert "layer 0: prefill: each node once" in str(fd.explain(model).last_call.lines())
        assert "its context, captured" in str(fd.explain(model).last_call.lines())


def test_captures_in_vain_become_rarer(monkeypatch):
    monkeypatch.setattr(captured_prefill, "_PASSES_THAT_PAY_A_CAPTURE", {True: 2, False: 3})
    captures, shape = CapturedPrefills(), PrefillShape(64, 1, False, False, 0, 64)
    assert [number for number in range(1, 50) if captures.pays(shape, forced=False)] == [3, 6, 12, 24, 48]
    assert [number for number in range(50, 140) if captures.pays(shape, forced=True)] == [64, 128]


@pytest.mark.parametrize(
    ("tokens", "wanted", "size"),
    [
        *((1, 1, (64, 1)), (64, 3, (64, 4)), (65, 65, (128, 128)), (257, 200, (384, 256)), (512, 5, (512, 8))),
        *((513, 1, (576, 1)), (2048, 1, (2048, 1))),
    ],
)
def test_shapes(tokens, wanted, size):
    shape = PrefillShape.of([], tokens, wanted, 0, 64)
    assert shape is not None
    assert (shape.tokens, shape.wanted) == size
    assert PrefillShape.of([], 2049, 1, 0, 64) is None


def test_contexts_decide_the_launch_parameters(uncaptured, monkeypatch):
    """Of chains, which trees of short nodes are read in, and not the levels that tables have room for."""
    config = Config(16, block_n=32, chain=4)
    by_levels = lambda forest, *_, **__: config if len(forest.levels) > 1 else replace(config, chain=1)  # noqa: E731
    monkeypatch.setattr(plan, "decode_config", by_levels)
    model = tiny_model(num_hidden_layers=1)
    prompts = [{"input_ids": ragged_prompts(100, 100, shared=70, seed=seed)["input_ids"][1:]} for seed in range(4)]
    for prompt in prompts[1:]:
        prompt["input_ids"][:, :70] = prompts[0]["input_ids"][:, :70]
    with fd.enabled(model, mode="graph", reuse_prefix=True, **OPTIONS):
        assert [first_token(model, prompt)[1] for prompt in prompts] == [100, 30, 30, 30]
        assert state_of(model).captures.prefills.count == 2  # without contexts and with


def test_long_passes_take_one_prompt():
    one, other = (PrefillItem(Span(0, start, 300)) for start in (0, 300))
    assert PrefillShape.of([one], 600, 1, 0, 64) is not None
    assert PrefillShape.of([one, other], 600, 2, 0, 64) is None
    assert PrefillShape.of([PrefillItem(Span(1, 0, 600), context=(one.span,))], 600, 1, 0, 64) is None


def test_eager_calls_capture_nothing(uncaptured, monkeypatch):
    monkeypatch.setattr(CapturedPrefill, "__init__", None)
    model = tiny_model(num_hidden_layers=1)
    with fd.enabled(model, mode="eager", **OPTIONS):
        assert first_token(model, ragged_prompts(30))[1] == 0
    with fd.enabled(model, **OPTIONS):  # one token does not pay for a capture
        assert first_token(model, ragged_prompts(30))[1] == 0
    with fd.enabled(model, mode="graph", **OPTIONS):
        assert first_token(model, ragged_prompts(300, 300))[1] == 0  # too long for two


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
def test_a_pass_that_cannot_be_captured_runs_eagerly(kind, uncaptured, monkeypatch, caplog):
    """It is tried again when `enable` is called again; for lack of memory also later."""
    tried = []

    def broken(*args):
        tried.append(1)
        raise kind("not now")

    monkeypatch.setattr(CapturedPrefill, "__init__", broken)
    model, prompt = tiny_model(num_hidden_layers=1), ragged_prompts(30)
    with fd.enabled(model, mode="graph", **OPTIONS), caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        for _ in range(4):
            assert first_token(model, prompt)[1] == 0
        assert len(tried) == (1 if kind is RuntimeError else 3)  # at the first, second and fourth time
        first_token(model, ragged_prompts(15, 15))
        assert len(tried) == (2 if kind is RuntimeError else 4)  # several prompts may take what one does not
        assert fd.explain(model).last_call.prefill_reason == "not now"
        assert "prefill passes cannot be captured: not now" in str(fd.explain(model).last_call.lines())
        fd.enable(model, mode="graph", **OPTIONS)
        first_token(model, ragged_prompts(100))
        assert len(tried) == (3 if kind is RuntimeError else 5)
    messages = [record.getMessage() for record in caplog.records if "captured" in record.getMessage()]
    assert messages == ["prefill of this model runs eagerly: its passes cannot be captured (not now)"]


def test_changed_weights(uncaptured):
    """Those changed in place are read; those that moved are captured again, before they are used."""
    model, prompt = tiny_model(num_hidden_layers=1), ragged_prompts(30)
    with fd.enabled(model, mode="graph", **OPTIONS):
        first_token(model, prompt)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        doubled = first_token(model, prompt)[0].logits[0]
        assert state_of(model).captures.prefills.count == 1
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight / 2)
        halved = first_token(model, prompt)[0]
        assert state_of(model).captures.prefills.count == 2
        assert torch.allclose(2 * halved.logits[0], doubled, rtol=1e-6)


def test_the_passes_that_were_used_last_are_kept(uncaptured, monkeypatch):
    monkeypatch.setattr(captured_prefill, "_MOST_PASSES", 2)
    model = tiny_model(num_hidden_layers=1)
    with fd.enabled(model, mode="graph", **OPTIONS):
        for length in (60, 100, 10, 150):
            first_token(model, ragged_prompts(length))
        assert [one.shape.tokens for one in state_of(model).captures.prefills._passes] == [64, 192]
        state_of(model).captures.clear()
        assert not state_of(model).captures.prefills._passes


def test_kept_bytes_count_what_layers_share_once(uncaptured):
    """A captured pass stores the keys and values of all layers in one tensor."""
    model = tiny_model()
    with fd.enabled(model, mode="graph", reuse_prefix=True, **OPTIONS):
        assert first_token(model, ragged_prompts(100))[1] == 100
        assert fd.explain(model).last_call.kept_bytes == 100 * 2 * 2 * 2 * 16 * 4
