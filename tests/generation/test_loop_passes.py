"""Captured passes of other decoding loops: on a GPU in graphs; here the same passes, uncaptured and interpreted."""

import copy
import threading
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.utils import ModelOutput

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.shared import SharedContextCache
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import cuda_graph, loop_passes, modes
from hf_fastdecode.generation.steps.captured_pass import CapturedPass, OutputFields
from hf_fastdecode.generation.steps.compiled_layers import CompiledLayers

from ..architectures.classes import tiny_model_of
from ..interpreter import merging_two_at_once
from ..tiny_models import VOCABULARY, ragged_prompts, seeded, tiny_model
from .calls import PROMPT

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")

# Interpreting takes time by the program: one for each layer, KV head and row.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES = {"llama-gqa": SMALL, "llama-mha": SMALL | {"num_key_value_heads": 2}, "gpt2": {"n_layer": 1, "n_head": 2}}
WINDOWED = {"mistral-window": SMALL, "gemma3_text": SMALL | {"num_hidden_layers": 2, "head_dim": 32}}
PROMPTS = ragged_prompts(41, 36, shared=33)
TWICE = {key: part.repeat(2, 1) for key, part in PROMPT.items()}
DICT = {"return_dict_in_generate": True}
CALLS = {
    "beams": {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 5} | DICT | {"output_scores": True},
    "beam-sample": {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4, "do_sample": True, "top_k": 0},
    "finished-beams": {"num_beams": 3, "max_new_tokens": 8, "eos_token_id": list(range(3, 40))},
    "hidden-states": {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 4}
    | DICT
    | {"output_hidden_states": True, "output_logits": True},
}


@pytest.fixture(scope="module", autouse=True)
def merging_in_pairs():
    """Interpreted kernels take less time so."""
    with merging_two_at_once():
        yield


@pytest.fixture(autouse=True)
def uncaptured(monkeypatch):
    """Let captured modes run where kernels are interpreted."""
    for module in (modes, loop_passes):
        monkeypatch.setattr(module, "capture_reason", lambda *_: None)


def small(name="llama-gqa"):
    return tiny_model(name, **(SIZES | WINDOWED)[name])


def enabled(model, **options):
    return fd.enabled(model, **{"mode": "graph", "backend": "triton", "min_saved_tokens": 1, **options})


def sequences(out):
    return out if isinstance(out, torch.Tensor) else out.sequences


def both(model, prompt, arguments, **options):
    """What stock and captured loops return, and the captured one's report."""
    stock = seeded(lambda: model.generate(**prompt, **arguments))
    with enabled(model, **options):
        captured = seeded(lambda: model.generate(**prompt, **arguments))
        return stock, captured, fd.explain(model).last_call


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", [*SIZES, *WINDOWED])
def test_tokens_are_those_of_stock(name, call):
    stock, captured, report = both(small(name), PROMPTS, CALLS[call])
    assert torch.equal(sequences(captured), sequences(stock))
    assert (report.path, report.mode) == ("shared", "graph")
    assert "ran eagerly" not in report.mode_reason
    assert "captured" in report.layers[0]
    assert report.captures == 1
    if call == "beams":
        torch.testing.assert_close(captured.sequences_scores, stock.sequences_scores)
        assert torch.equal(captured.beam_indices, stock.beam_indices)
    if call == "hidden-states":
        for own, theirs in zip(captured.hidden_states[1:], stock.hidden_states[1:], strict=True):
            torch.testing.assert_close(own, theirs, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(captured.logits, stock.logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("draft", ["model", "lookup"])
@pytest.mark.parametrize("name", SIZES)
def test_drafts(name, draft):
    """Tokens that are not accepted are cropped, at first from the prompt, then from the suffix."""
    model, arguments = small(name), {"max_new_tokens": 10}
    arguments |= {"assistant_model": tiny_model(name, seed=3)} if draft == "model" else {"prompt_lookup_num_tokens": 3}
    repeating = {key: part[:, :30].repeat(1, 2) for key, part in PROMPT.items()}
    stock = model.generate(**repeating, **arguments)
    with enabled(model):
        cache = fd.prefill(model, repeating["input_ids"][:, :-1])
        assert torch.equal(model.generate(**repeating, **arguments, **{CACHE: cache}), stock)
        report = fd.explain(model).last_call
    assert report.mode == "graph"
    assert "ran eagerly" not in report.mode_reason
    assert report.captures in (1, 2)  # of one token, and of up to four
    assert cache.later_passes is None


def test_drafts_of_a_lone_prompt():
    """It shares with no other row, but captured passes are faster than stock's all the same."""
    repeating = {key: part[:1, :30].repeat(1, 2) for key, part in PROMPTS.items()}
    stock, captured, report = both(small(), repeating, {"max_new_tokens": 6, "prompt_lookup_num_tokens": 3})
    assert torch.equal(captured, stock)
    assert (report.path, report.mode) == ("shared", "graph")


def test_a_users_loop_over_a_lone_prompt_keeps_its_keys():
    def reads(model, input_ids, **arguments):
        model(input_ids, **{CACHE: arguments[CACHE]})
        return arguments[CACHE].layers[0].keys

    model = small()
    with enabled(model):
        assert model.generate(**PROMPT, custom_generate=reads, max_new_tokens=4).shape[2] == 80


def loop(actions, outputs):
    """A loop of the user's: a prefill, then a pass for each action, on tokens that do not depend on logits.

    An action is a number of tokens, arguments for a pass of one token, or a function of the model and the cache.
    """

    def run(model, input_ids, **arguments):
        generator, cache = torch.Generator().manual_seed(5), arguments[CACHE]
        model(input_ids, logits_to_keep=1, **{CACHE: cache})
        for action in actions:
            if callable(action):
                action(model, cache)
                continue
            tokens, extra = (action, {}) if isinstance(action, int) else (1, action)
            fed = torch.randint(3, VOCABULARY, (cache.rows, tokens), generator=generator)
            output = model(fed, **{CACHE: cache}, **extra)
            assert output[CACHE] is cache
            outputs.append(output.logits)
        return input_ids

    return run


def logits_of(model, actions, *, mode="graph", **call):
    """Logits of each pass of a loop, and the call's report."""
    found = []
    with enabled(model, mode=mode, backend="auto"):
        model.generate(**TWICE, custom_generate=loop(actions, found), max_new_tokens=100, **call)
        return found, fd.explain(model).last_call


def check(model, actions, **call):
    """Run a loop eagerly and captured, compare the logits of its passes, and return the captured one's report."""
    expected, report = logits_of(copy.deepcopy(model), actions, mode="eager", **call)
    assert report.mode == "eager"
    found, report = logits_of(model, actions, **call)
    for own, theirs in zip(found, expected, strict=True):
        assert own.shape == theirs.shape
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)
    return report


def reorder(*rows):
    return lambda model, cache: cache.reorder_cache(torch.tensor(rows))


LOOPS = {
    "several tokens": [1, 3, 4, 1],
    "a divided pass": [20, 1],
    "cropped": [4, lambda model, cache: cache.crop(-3), 2, lambda model, cache: cache.crop(-6), 1],
    "reordered": [2, reorder(1, 0), 1, reorder(1, 1), 3, reorder(0, 1), 1],
    "reordered and cropped": [2, reorder(1, 1), 3, lambda model, cache: cache.crop(-2), reorder(1, 0), 2],
    "rows of other lengths": [3, lambda model, cache: cache.drop_last([2, 0]), 2, reorder(1, 0), 1],
    "fewer rows": [2, lambda model, cache: cache.select_rows([1]), 1],
    "kept logits": [{"logits_to_keep": 1}, 3],
    "longer than an own node": [64, 63, 2, 3, lambda model, cache: cache.crop(-6), 16, 1],
}


@pytest.mark.parametrize("actions", LOOPS.values(), ids=LOOPS)
def test_loops_of_the_users(actions):
    """All outputs are compared at the end: no later pass overwrites them."""
    report = check(small(), actions)
    assert report.mode == "graph"
    assert "ran eagerly" not in report.mode_reason


@pytest.mark.parametrize("name", WINDOWED)
def test_passes_that_outgrow_a_window(name):
    model = tiny_model(name, **WINDOWED[name] | {"sliding_window": 84})
    report = check(model, [1, 3, reorder(1, 0), 4, 1])
    assert report.mode == "graph"


def test_a_suffix_that_moves(monkeypatch):
    monkeypatch.setattr("hf_fastdecode.cache.storage._FIRST_CAPACITY", 2)
    report = check(small(), [1, 1, 3, reorder(1, 0), 1, 1])
    assert report.captures == 3  # of one and of several tokens in order, and of one reordered


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
        assert state_of(model).captures.lock.acquire(blocking=False)
        state_of(model).captures.lock.release()
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
    stock, captured, report = both(model, PROMPTS | {"position_ids": planes}, {"num_beams": 2, "max_new_tokens": 3})
    assert torch.equal(captured, stock)
    assert (report.path, report.mode) == ("shared", "graph")
    assert "ran eagerly" not in report.mode_reason


def test_a_model_with_a_loop_of_its_own():
    """Its class prepares the inputs of each pass."""
    model = tiny_model_of("Ernie4_5_VLMoeForConditionalGeneration")
    call = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 3}
    stock, captured, report = both(model, PROMPTS, call)
    assert torch.equal(captured, stock)
    assert "prepare_inputs_for_generation uses another decoding loop" in report.mode_reason
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
        assert not state_of(model).captures.lock.acquire(blocking=False)
        twin = copy.deepcopy(cache)
        assert twin.later_passes is None
        kept.append(cache)
        raise RuntimeError("mine")

    model = small()
    with enabled(model):
        with pytest.raises(RuntimeError, match="mine"):
            model.generate(**TWICE, custom_generate=loop([1, fail], []), max_new_tokens=4)
        assert kept[0].later_passes is None
        assert state_of(model).captures.owner is None
        assert state_of(model).captures.lock.acquire(blocking=False)
        state_of(model).captures.lock.release()


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

    monkeypatch.setattr(cuda_graph.CapturedStep, "__init__", fail)
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
        assert state_of(model).captures.lock.acquire(blocking=False)
        state_of(model).captures.lock.release()


def test_compiled_layers_are_for_passes_of_one_token():
    torch._dynamo.reset()
    model, compiled = small(), []
    installed = CompiledLayers.installed

    def counted(self, *args):
        compiled.append(args)
        return installed(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledLayers, "installed", counted)
        patch.setattr(CompiledLayers.__init__, "__defaults__", ("eager",))
        report = check(model, [1, 3, {"output_hidden_states": True}, 1])
        assert report.mode == "graph"
        assert not compiled
        _, report = logits_of(small(), [1, 3, {"output_hidden_states": True}, 1], mode="compile")
    assert report.mode == "compile"
    assert len(compiled) == 2


class WithLoss(LlamaForCausalLM):
    """Returns a number of all rows together with their logits."""

    def forward(self, input_ids=None, position_ids=None, **arguments):
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **arguments)
        output["loss"] = output.logits.mean()
        return output


def test_an_output_that_cannot_be_replayed(monkeypatch):
    make = cuda_graph.CapturedStep.__init__

    def make_and_warm_up(self, *args):  # as on a GPU
        make(self, *args)
        self._graph.replay()

    monkeypatch.setattr(cuda_graph.CapturedStep, "__init__", make_and_warm_up)
    model = small()
    monkeypatch.setattr(model, "__class__", WithLoss)
    call = PROMPTS | {"num_beams": 2, "max_new_tokens": 3}
    stock = model.generate(**call)
    with enabled(model, mode="auto", backend="auto"):
        state_of(model).captures.steps_asked = 1000
        assert torch.equal(model.generate(**call), stock)
        report = fd.explain(model).last_call
        assert not state_of(model).captures.pass_failures
    assert (report.path, report.mode) == ("shared", "eager")
    assert "the model's output has 'loss' ([])" in report.mode_reason
    with enabled(model), pytest.raises(ValueError, match="mode='graph' cannot run: the model's output has"):
        model.generate(**call)
