"""Captured decode steps of slim models: on a GPU in graphs; here the same steps, uncaptured and interpreted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache import storage
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import captured_step, modes
from hf_fastdecode.generation.structure import Structure
from hf_fastdecode.kernels.device import triton_is_installed

from ..tiny_models import ragged_prompts, seeded
from .family_models import NOT_BY_KERNEL, PLANS, family_model, family_pair
from .slim_models import TEXT, two_heads

pytestmark = pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU")
PROMPTS = ragged_prompts(24, 19, shared=17)
SAMPLES: dict[str, Any] = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 4}


@pytest.fixture
def small_capacities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suffixes move every few tokens."""
    monkeypatch.setattr(storage, "_FIRST_CAPACITY", 4)


def both(model: PreTrainedModel, slim: PreTrainedModel, **call: Any) -> tuple[Tensor, Tensor, Any]:
    """Tokens of the ordinary model in stock transformers, of the slim one by captured steps, and the call's report."""
    call = {**PROMPTS, **SAMPLES, **call}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(slim, mode="graph", backend="triton"):
        return stock, seeded(lambda: slim.generate(**call)), fd.explain(slim).last_call


@on_the_cpu
@pytest.mark.parametrize(
    ("name", "plan"),
    [("gpt2", "k"), ("gpt_neox", "k+r"), ("qwen2", "mixed"), ("stablelm", "k+r"), ("llama-yarn", "k+r")],
)
def test_samples_of_every_kind(name: str, plan: str, uncaptured: None) -> None:
    """Without RoPE, with partial RoPE and YaRN's, with biases, and beside layers that keep values."""
    stock, found, report = both(*family_pair(name, plan))
    assert torch.equal(found, stock)
    assert (report.path, report.mode, report.captures) == ("shared", "graph", 1)
    assert "slim suffixes by slim_decode, captured" in report.layers[-1]


@on_the_cpu
def test_eight_bits(uncaptured: None) -> None:
    """Tokens are those of PyTorch's operators, which read what is cached in another way."""
    slim = to_slim(family_model("qwen2"), TEXT, plan=PLANS["k+r"], cache_dtype="int8", tolerance=1e9)
    with fd.enabled(slim, mode="graph", backend="triton"):
        found = seeded(lambda: slim.generate(**PROMPTS, **SAMPLES))
        assert "slim suffixes by slim_decode, captured" in fd.explain(slim).last_call.layers[-1]
    with fd.enabled(slim, mode="eager"):
        assert torch.equal(found, seeded(lambda: slim.generate(**PROMPTS, **SAMPLES)))


@on_the_cpu
def test_suffixes_that_move_are_captured_again(uncaptured: None, small_capacities: None) -> None:
    model, slim = two_heads("mixed")
    call = PROMPTS | SAMPLES | {"max_new_tokens": 11, "num_return_sequences": 1}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(slim, mode="graph", backend="triton"):
        out = seeded(lambda: slim.generate(**call, return_dict_in_generate=True))
        report = fd.explain(slim).last_call
    assert torch.equal(out.sequences, stock)
    assert (report.mode, report.captures) == ("graph", 3)
    suffix = out[CACHE].layers[1].storage.suffix
    assert [tuple(part.shape) for part in suffix] == [(2, 1, 11, 64), (2, 1, 11, 8)]


@on_the_cpu
def test_rows_that_finish_leave(uncaptured: None, small_capacities: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_STEPS_OF_A_CAPTURE", 0)  # of so few steps none pays for a capture
    model, slim = two_heads()
    ends = {"num_return_sequences": 4, "eos_token_id": list(range(3, 30)), "pad_token_id": 0, "max_new_tokens": 16}
    stock, found, report = both(model, slim, **ends)
    assert torch.equal(found, stock)
    assert report.mode == "graph"
    assert report.compactions >= 2
    assert report.captures > report.compactions  # and those of longer suffixes


@on_the_cpu
def test_every_call_captures_and_drops_what_earlier_calls_captured(uncaptured: None) -> None:
    model, slim = two_heads()
    calls = [SAMPLES | {"max_new_tokens": 3, "num_return_sequences": samples} for samples in (2, 1, 2)]
    with fd.enabled(slim, mode="graph", backend="triton"):
        captures = state_of(slim).captures
        for number, call in enumerate(calls, 1):
            stock = seeded(lambda call=call: model.generate(**PROMPTS, **call))
            assert torch.equal(seeded(lambda call=call: slim.generate(**PROMPTS, **call)), stock)
            assert captures.count == number
            assert [step.rows for step in captures._steps] == [2 * call["num_return_sequences"]]


@on_the_cpu
@pytest.mark.parametrize("mode", ["auto", "graph"])
def test_a_later_capture_that_fails(
    mode: str, uncaptured: None, small_capacities: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call goes on eagerly, unless captured steps are forced."""
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_CAPTURE_FOR_ONE_CALL", 0)
    make, made = captured_step.CapturedStep.__init__, []

    def make_or_fail(self: Any, *args: Any) -> None:
        made.append(1)
        if len(made) > 1:
            raise RuntimeError("not permitted when capturing")
        make(self, *args)

    monkeypatch.setattr(captured_step.CapturedStep, "__init__", make_or_fail)
    model, slim = two_heads()
    call = PROMPTS | SAMPLES | {"max_new_tokens": 10}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(slim, mode=mode, backend="triton"):
        if mode == "graph":
            with pytest.raises(ValueError, match="mode='graph' cannot run: not permitted"):
                slim.generate(**call)
            return
        assert torch.equal(seeded(lambda: slim.generate(**call)), stock)
        report = fd.explain(slim).last_call
    assert (report.mode, report.mode_reason, report.captures) == ("eager", "not permitted when capturing", 1)
    assert len(made) == 2


@on_the_cpu
def test_a_returned_cache_is_not_written_by_later_calls(uncaptured: None) -> None:
    model, slim = two_heads()
    call = SAMPLES | {"max_new_tokens": 4, "return_dict_in_generate": True}
    with fd.enabled(slim, mode="graph", backend="triton"):
        first = seeded(lambda: slim.generate(**PROMPTS, **call))
        slim.generate(**ragged_prompts(30, seed=3), **call)
        mask = torch.cat([PROMPTS["attention_mask"].repeat_interleave(2, 0), torch.ones(4, 4).long()], 1)
        turn = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 4}
        found = slim.generate(first.sequences, **turn, **{CACHE: first[CACHE]})
        assert fd.explain(slim).last_call.mode == "graph"
    assert torch.equal(found, model.generate(first.sequences, **turn))


@on_the_cpu
def test_a_short_call_does_not_pay(uncaptured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever calls came before it: its captures serve no other."""
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_CAPTURE_FOR_ONE_CALL", 3)
    slim = two_heads()[1]
    found = []
    with fd.enabled(slim, backend="triton"):
        for tokens in (2, 2, 3):
            slim.generate(**PROMPTS, **SAMPLES | {"max_new_tokens": tokens})
            found.append(fd.explain(slim).last_call.mode_reason)
    assert found == [*["2 steps of this call do not pay for a capture"] * 2, "3 steps of this call pay for a capture"]


@pytest.mark.parametrize(
    ("name", "plan", "options", "reason"),
    [*NOT_BY_KERNEL, ("phi3-long", "k", {}, "RoPE of type 'longrope' changes its frequencies with the length")],
)
def test_layers_that_the_kernel_does_not_take(name: str, plan: str, options: dict[str, Any], reason: str) -> None:
    slim = to_slim(family_model(name), TEXT, plan=PLANS[plan], **options)
    call = PROMPTS | SAMPLES | {"max_new_tokens": 3}
    with fd.enabled(slim, min_saved_tokens=0):
        slim.generate(**call)
        report = fd.explain(slim).last_call
        assert (report.path, report.mode) == ("shared", "eager")
        assert reason in report.mode_reason
    with (
        fd.enabled(slim, mode="graph", min_saved_tokens=0),
        pytest.raises(ValueError, match=f"mode='graph' cannot run: .*{reason}"),
    ):
        slim.generate(**call)


@on_the_cpu
def test_rows_that_the_kernel_does_not_take(uncaptured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of fewer rows are captured all the same."""
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_CAPTURE_FOR_ONE_CALL", 0)
    make = captured_step.CapturedStep.__init__

    def make_few(self: Any, model: PreTrainedModel, rows: int, *args: Any) -> None:
        if rows > 2:  # on a GPU the pass that is captured says so
            raise Unsupported(f"it takes up to 2 rows, got {rows}")
        make(self, model, rows, *args)

    monkeypatch.setattr(captured_step.CapturedStep, "__init__", make_few)
    slim, found = two_heads()[1], []
    with fd.enabled(slim):
        for samples in (2, 1):
            slim.generate(**PROMPTS, **SAMPLES | {"max_new_tokens": 3, "num_return_sequences": samples})
            report = fd.explain(slim).last_call
            found.append((report.mode, report.mode_reason))
    assert found == [("eager", "it takes up to 2 rows, got 4"), ("graph", "3 steps of this call pay for a capture")]


@on_the_cpu
@torch.no_grad()
def test_rows_of_different_lengths(uncaptured: None) -> None:
    """Rows accepted different numbers of drafts."""
    model, slim = two_heads()
    drafts, ids, kept = TEXT[20:32].view(3, 4), TEXT[40:43], torch.tensor([3, 1, 2])
    with fd.enabled(slim, backend="triton"):
        cache = fd.prefill(slim, TEXT[None, :20])
        cache.batch_repeat_interleave(3)
        for draft in drafts.split(1, 1):
            slim(draft, **{CACHE: cache})
        cache.drop_last(4 - kept)
        cache.reserve(5)
        options = captured_step.CaptureOptions(0, ())
        step = state_of(slim).captures.find(slim, cache, Structure(slim), options)
        found = step(cache, ids, 20 + kept)
        eager = slim(ids[:, None], **{CACHE: cache}, position_ids=20 + kept[:, None]).logits[:, -1]
    for row, count in enumerate(kept):
        text = torch.cat([TEXT[:20], drafts[row, :count], ids[row : row + 1]])
        torch.testing.assert_close(found[row], model(text[None]).logits[0, -1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, eager, atol=1e-5, rtol=1e-5)


class Operators(TorchDispatchMode):
    """Records operators with the shapes and numbers that they get, which a graph would replay."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not str(func).startswith("aten.set_"):  # of the interpreter
            given = tree_map(lambda one: tuple(one.shape) if isinstance(one, Tensor) else one, (args, kwargs))
            self.calls.append((str(func), repr(given)))
        return func(*args, **(kwargs or {}))


@on_the_cpu
@torch.no_grad()
@pytest.mark.parametrize(("name", "plan"), [("gpt2", "k"), ("qwen2", "mixed"), ("gpt_neox", "k+r")])
def test_steps_of_all_lengths_are_one_graph(name: str, plan: str, uncaptured: None) -> None:
    """Steps run equal operators over equal shapes, none of which reads a number or copies one from the host."""
    slim, recorded = copy.deepcopy(family_pair(name, plan)[1]), []
    slim.config.pad_token_id = None  # as of trained GPT-2; with one, transformers' GPT-2 looks for it on the host
    ids = TEXT[40:42]
    with fd.enabled(slim, backend="triton"):
        cache = fd.prefill(slim, TEXT[None, :20])
        cache.batch_repeat_interleave(2)
        slim(ids[:, None], **{CACHE: cache})
        cache.reserve(8)
        options = captured_step.CaptureOptions(0, ())
        step = state_of(slim).captures.find(slim, cache, Structure(slim), options)
        for position in (21, 22):
            step(cache, ids, torch.full((2,), position))
            with step._graph._context(), Operators() as operators:
                step._graph._run()
            recorded.append(operators.calls)
            cache.record_captured_step(ids[:, None])
    assert len(recorded[0]) > 50
    assert recorded[0] == recorded[1]
    from_host = [call for call in recorded[0] if any(one in call[0] for one in ("_local_scalar_dense", "lift_fresh"))]
    assert not from_host


@on_the_cpu
def test_passes_of_other_loops(uncaptured: None, caplog: pytest.LogCaptureFixture) -> None:
    """Captured with one token of each row, in order; beams, which reorder rows, run eagerly."""
    model, slim = two_heads()
    call: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True}
    call = {**PROMPTS, **SAMPLES, **call}
    stock = seeded(lambda: model.generate(**call))
    beams = model.generate(**PROMPTS, num_beams=2, max_new_tokens=3)
    with fd.enabled(slim, mode="graph", backend="triton", min_saved_tokens=1):
        found = seeded(lambda: slim.generate(**call))
        report = fd.explain(slim).last_call
        assert torch.equal(found.sequences, stock.sequences)
        assert (report.mode, report.captures) == ("graph", 1)
        assert "slim suffixes by slim_decode, captured" in report.layers[-1]
        assert "ran eagerly" not in report.mode_reason
        assert torch.equal(slim.generate(**PROMPTS, num_beams=2, max_new_tokens=3), beams)
        report = fd.explain(slim).last_call
    assert (report.mode, report.captures) == ("eager", 0)
    assert "slim layers are captured with one token of each row, in order" in report.mode_reason
    assert "mode='graph' not used: slim layers" in caplog.text
