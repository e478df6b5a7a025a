"""Passes of other loops that are not captured, or whose captures end: what they are, and what happens then."""

import copy
import threading
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaForCausalLM, LogitsProcessorList
from transformers.utils import ModelOutput

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.prompts import first_pass
from hf_fastdecode.generation.steps import captured_step, loop_passes, modes
from hf_fastdecode.generation.steps.captured_step import CapturedPass, OutputFields

from ...architectures.classes import tiny_model_of
from ...tiny_models import VOCABULARY, ragged_prompts
from .passes import DICT, PROMPTS, TWICE, both, check, enabled, loop, require_captured, small

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU"),
    pytest.mark.usefixtures("uncaptured"),
]

UNUSUAL = {
    "'labels' is a Tensor": {"labels": torch.zeros(2, 1, dtype=torch.long)},
    "logits_to_keep is not a number": {"logits_to_keep": torch.tensor([0])},
    "more than 64 tokens": 65,
}


@pytest.mark.parametrize("reason", UNUSUAL)
def test_unusual_passes_run_eagerly_among_captured_ones(reason):
    report = check(small(), [1, UNUSUAL[reason], 1])
    assert report.mode == "graph"
    assert "1 of 3 passes ran eagerly" in report.mode_reason
    assert reason in report.mode_reason


def test_a_loop_none_of_whose_passes_is_captured(caplog):
    report = check(small(), [65, 65])
    assert report.mode == "eager"
    assert report.mode_reason == "it has more than 64 tokens in each row"
    assert "mode='graph' not used: it has more than 64 tokens in each row" in caplog.text


def test_gradients_and_other_threads():
    seen = []

    def with_gradients(model, cache):
        with torch.enable_grad():
            seen.append(model(torch.full((2, 1), 5), **{CACHE: cache}).logits)
        cache.crop(-1)

    def in_a_thread(model, cache):
        def run():
            with torch.no_grad():
                seen.append(model(torch.full((2, 1), 5), **{CACHE: cache}).logits)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        cache.crop(-1)

    report = check(small(), [1, with_gradients, in_a_thread, 1])
    assert "2 of 4 passes ran eagerly" in report.mode_reason
    assert seen[2].requires_grad
    torch.testing.assert_close(seen[3], seen[2].detach())


def test_a_pass_under_another_autocast():
    """It computes in another dtype than the cache holds, as its eager pass finds."""

    def under_autocast(model, cache):
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"another torch\.autocast"):
            model(torch.full((2, 1), 5), **{CACHE: cache})

    report = check(small(), [1, under_autocast])
    assert "1 of 2 passes ran eagerly: it runs under another torch.autocast" in report.mode_reason


def test_a_loop_that_goes_on_after_generate(caplog):
    """As a generator does: the captures are no longer held."""

    def generator(model, input_ids, **arguments):
        with torch.no_grad():
            for fed in (input_ids, input_ids[:, :1], input_ids[:, :2]):
                yield model(fed, **{CACHE: arguments[CACHE]}).logits

    model = small()
    with enabled(model, backend="auto"):
        shapes = [one.shape[1] for one in model.generate(**TWICE, custom_generate=generator, max_new_tokens=4)]
        report = fd.explain(model).last_call
        assert state_of(model).captures.lock.holder is None
    assert shapes == [80, 1, 2]
    assert (report.path, report.mode) == ("shared", "eager")
    assert "mode='graph' not used: the decoding loop runs outside of generate" in caplog.text


@dataclass
class Output(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    rope_deltas: torch.Tensor | None = None


def test_fields_of_outputs():
    """Tensors are of the pass, or an attribute that each call sets anew; others cannot be replayed."""
    model = tiny_model_of("Qwen2VLForConditionalGeneration")
    fields, logits = OutputFields((2, 3)), torch.randn(2, 3, 5)
    model.model.rope_deltas = torch.zeros(4, 1)
    output = Output(logits=logits, rope_deltas=model.model.rope_deltas, hidden_states=(logits,))
    tensors = fields.take(model, output)
    model.model.rope_deltas = later = torch.ones(4, 1)
    made = fields.output(tensors, SharedContextCache(), kept=2)
    assert type(made) is Output
    assert made.rope_deltas is later
    assert torch.equal(made.logits, logits[:, 1:])
    assert torch.equal(made.hidden_states[0], logits)
    for refused in ({"logits": logits[:, :1]}, {"logits": logits, "loss": torch.tensor(0.0)}, {"rope_deltas": later}):
        with pytest.raises(Unsupported, match="the model's output has"):
            fields.take(model, Output(**refused))


@pytest.mark.parametrize("differ", [False, True], ids=["text", "planes"])
def test_positions_with_planes(differ):
    model = tiny_model_of("Qwen2VLForConditionalGeneration")
    text = (PROMPTS["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    planes = text[None].repeat(4, 1, 1)
    planes[2:] -= (text > 20) * (text - 20) // 2 * differ
    *_, report = both(model, PROMPTS | {"position_ids": planes}, {"num_beams": 2, "max_new_tokens": 3})
    require_captured(report)
    assert report.path == "shared"


def test_a_model_with_a_loop_of_its_own():
    """Its class prepares the inputs of each pass."""
    model = tiny_model_of("Phi4MultimodalForCausalLM")
    call = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 3}
    *_, report = both(model, PROMPTS, call)
    assert "prepare_inputs_for_generation uses another decoding loop" in report.sampler_reason
    assert "ran eagerly" not in report.mode_reason


def test_a_model_that_changes_between_passes():
    def other_weights(model, cache):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))

    report = check(small(), [1, other_weights, 1, 1])
    assert "2 of 3 passes ran eagerly: the model's weights or modules changed between passes" in report.mode_reason


def test_settings_and_hooks_between_passes(monkeypatch):
    seen = []

    def set_scale(factor):
        def act(model, cache):
            model.model.layers[0].self_attn.scaling *= factor

        return act

    def hook(model, cache):
        model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))

    report = check(small(), [1, set_scale(1.0), 1])  # another object of the same value
    assert "ran eagerly" not in report.mode_reason
    report = check(small(), [1, set_scale(2.0), 1])
    assert "1 of 2 passes ran eagerly: the model's weights or modules changed" in report.mode_reason

    def reason(model, *_):
        return "it has a hook" if model.model.layers[0]._forward_hooks else None

    for module in (modes, loop_passes):
        monkeypatch.setattr(module, "capture_reason", reason)
    report = check(small(), [1, hook, 1, 1])
    assert "2 of 3 passes ran eagerly: it has a hook" in report.mode_reason
    assert seen == [1, 1, 1, 1]


def test_captures_serve_later_calls():
    model = small()
    call = PROMPTS | {"num_beams": 2, "max_new_tokens": 4}
    stock = model.generate(**call)
    with enabled(model):
        assert torch.equal(model.generate(**call), stock)
        assert fd.explain(model).last_call.captures == 1
        other = ragged_prompts(50, 39, shared=20, seed=3) | {"num_beams": 2, "max_new_tokens": 3}
        model.generate(**other)
        assert torch.equal(model.generate(**call), stock)
        assert fd.explain(model).last_call.captures == 0
        assert {type(step) for step in state_of(model).captures._steps} == {CapturedPass}
        model.generate(**PROMPTS, max_new_tokens=2, do_sample=True, num_return_sequences=2)
        assert fd.explain(model).last_call.captures == 1  # a step is another thing


def test_the_lock_is_released_and_the_cache_left_alone_when_a_loop_raises():
    kept = []

    def fail(model, cache):
        assert state_of(model).captures.lock.holder is not None
        twin = copy.deepcopy(cache)
        assert twin.later_passes is None
        kept.append(cache)
        raise RuntimeError("mine")

    model = small()
    with enabled(model):
        with pytest.raises(RuntimeError, match="mine"):
            model.generate(**TWICE, custom_generate=loop([1, fail], []), max_new_tokens=4)
        assert kept[0].later_passes is None
        assert state_of(model).captures.lock.holder is None


def test_a_first_pass_that_turns_out_to_run_stock_leaves_captures_to_others(monkeypatch):
    """Calls within its loop, or of other threads, need not wait for it."""

    def late(*_):
        assert captures.lock.holder is not None
        raise Unsupported("late")

    def noted(ids, scores):
        owners.append(captures.owner)
        return scores

    model, owners = small(), []
    call = PROMPTS | {"num_beams": 2, "max_new_tokens": 3}
    stock = model.generate(**call)
    with enabled(model):
        captures = state_of(model).captures
        monkeypatch.setattr(first_pass, "_expand_to_rows", late)
        assert torch.equal(model.generate(**call, logits_processor=LogitsProcessorList([noted])), stock)
        assert fd.explain(model).last_call.reason.startswith("late")
    assert owners == [None] * 3


def test_a_call_inside_of_a_loop_runs_eagerly():
    model, inside = small(), []
    stock = model.generate(**PROMPTS, num_beams=2, max_new_tokens=3)

    def nested(model, cache):
        inside.append(model.generate(**PROMPTS, num_beams=2, max_new_tokens=3))
        inside.append(fd.explain(model).last_call)

    with enabled(model, mode="auto", backend="auto"):
        state_of(model).captures.steps_asked = 1000
        with torch.no_grad():
            model.generate(**TWICE, custom_generate=loop([1, nested, 1], []), max_new_tokens=4)
    assert torch.equal(inside[0], stock)
    assert (inside[1].mode, inside[1].mode_reason) == ("eager", "it runs inside another generate call of this model")


def test_a_returned_cache_goes_on_eagerly():
    model = small()
    with enabled(model), torch.no_grad():
        out = model.generate(**PROMPTS, num_beams=2, max_new_tokens=3, **DICT)
        assert out[CACHE].later_passes is None
        logits = model(torch.full((4, 1), 7), **{CACHE: out[CACHE]}).logits
    assert logits.shape == (4, 1, VOCABULARY)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("not permitted when capturing")])
def test_passes_that_cannot_be_captured(error, monkeypatch):
    tries = []

    def fail(*args):
        tries.append(args)
        raise error

    monkeypatch.setattr(captured_step.CapturedStep, "__init__", fail)
    model, call = small(), PROMPTS | {"num_beams": 2, "max_new_tokens": 4}
    stock = model.generate(**call)
    of_memory = isinstance(error, torch.OutOfMemoryError)
    with enabled(model, mode="auto", backend="auto"):
        state_of(model).captures.steps_asked = 1000
        for _ in range(2):
            assert torch.equal(model.generate(**call), stock)
            report = fd.explain(model).last_call
            assert report.mode == "eager"
            assert str(error) in report.mode_reason
        assert len(tries) == (2 if of_memory else 1)
        assert state_of(model).captures.failure(model.device) is None  # decode steps are captured all the same
    with enabled(model):
        if of_memory:
            assert torch.equal(model.generate(**call), stock)
        else:
            with pytest.raises(ValueError, match="mode='graph' cannot run: not permitted when capturing"):
                model.generate(**call)
        assert state_of(model).captures.lock.holder is None


class WithLoss(LlamaForCausalLM):
    """Returns a number of all rows together with their logits."""

    def forward(self, input_ids=None, position_ids=None, **arguments):
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **arguments)
        output["loss"] = output.logits.mean()
        return output


def test_an_output_that_cannot_be_replayed(monkeypatch):
    capture = captured_step.CapturedStep.capture

    def capture_and_warm_up(self):  # as on a GPU
        capture(self)
        self._graph.replay()

    monkeypatch.setattr(captured_step.CapturedStep, "capture", capture_and_warm_up)
    model = small()
    monkeypatch.setattr(model, "__class__", WithLoss)
    call = PROMPTS | {"num_beams": 2, "max_new_tokens": 3}
    stock = model.generate(**call)
    with enabled(model, mode="auto", backend="auto"):
        state_of(model).captures.steps_asked = 1000
        assert torch.equal(model.generate(**call), stock)
        report = fd.explain(model).last_call
        assert not state_of(model).captures.failures
    assert (report.path, report.mode) == ("shared", "eager")
    assert "the model's output has 'loss' ([])" in report.mode_reason
    with enabled(model), pytest.raises(ValueError, match="mode='graph' cannot run: the model's output has"):
        model.generate(**call)
