"""Calls under autocast share, and are captured: around the call, or within a `forward` that accelerate has wrapped."""

import copy
from types import MethodType

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import convert_outputs_to_fp32

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.autocast import casting_anew, computes_in
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import captured_prefill

from ..tiny_models import ragged_prompts, tiny_model
from .uncaptured import SMALL, on_the_cpu

PROMPTS = ragged_prompts(71, 57, shared=40)
CALL = {"max_new_tokens": 9, "num_return_sequences": 3, "do_sample": True, "top_k": 0}
LOGITS = {"return_dict_in_generate": True, "output_logits": True}
AROUND = ["llama-gqa", "gpt2", "gemma2", "gpt_oss", "mistral-window", "gpt_neox", "opt", "qwen3", "mixtral-window"]
CASES = [
    *((name, "around") for name in AROUND),
    ("llama-gqa", "prepared"),
    ("llama-gqa", "prepared_after"),
    ("gpt2", "prepared"),
]


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(mixed_precision="bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def errors(model, out):
    """The largest errors of a call's logits and of a stock forward pass over its tokens, against float32."""
    exact, device = copy.deepcopy(model).float(), model.device.type
    lengths = PROMPTS["attention_mask"].sum(1).repeat_interleave(CALL["num_return_sequences"])
    logits = torch.stack(out.logits, 1).float()
    ours = stock = 0.0
    for row, length in enumerate(lengths.tolist()):
        tokens = out.sequences[row : row + 1, 71 - length : -1]
        with torch.no_grad():
            expected = exact(tokens).logits[0, length - 1 :]
            with torch.autocast(device, torch.bfloat16):
                plain = model(tokens).logits[0, length - 1 :].float()
        ours = max(ours, float((logits[row] - expected).abs().max()))
        stock = max(stock, float((plain - expected).abs().max()))
    return ours, stock


@pytest.mark.parametrize(("name", "way"), CASES)
def test_calls_under_autocast_share(name, way, accelerator):
    model, plain = tiny_model(name), tiny_model(name)
    if way == "prepared":
        model = accelerator.prepare(model)
    fd.enable(model)
    if way == "prepared_after":
        model = accelerator.prepare(model)
    torch.manual_seed(0)
    with autocast() if way == "around" else torch.no_grad():
        out = model.generate(**PROMPTS, **CALL, **LOGITS)
        call = fd.explain(model).last_call
        assert call.path == "shared", call.reason
        assert call.prefilled_tokens == 71 + 57 - 40
        row = {"input_ids": out.sequences[:1], "attention_mask": torch.ones(1, 80, dtype=torch.long)}
        again = model.generate(**row, **CALL, **LOGITS, **{CACHE: out[CACHE]})
    assert out[CACHE].layers[0].storage.segments[0].keys.dtype == torch.bfloat16
    assert len(again.logits) == 9
    ours, stock = errors(plain, out)
    assert 0 < ours <= 2 * stock


@pytest.mark.parametrize("inside", [False, True])
def test_a_cache_is_of_one_dtype(inside):
    """Made under autocast and used outside of it, or the other way round."""
    model = fd.enable(tiny_model())
    with autocast() if inside else torch.no_grad():
        cache = fd.prefill(model, PROMPTS)
    with (
        torch.no_grad() if inside else autocast(),
        pytest.raises(ValueError, match=r"another torch\.autocast than when the cache was made"),
    ):
        model.generate(**PROMPTS, **CALL, **{CACHE: cache})
    with autocast() if inside else torch.no_grad():
        assert model.generate(**PROMPTS, **CALL, **{CACHE: cache}).shape == (6, 80)


def test_float64_stays_float64_under_autocast():
    model = fd.enable(tiny_model().double())
    with torch.no_grad(), autocast():
        cache = fd.prefill(model, PROMPTS)
        assert cache.layers[0].storage.segments[0].values.dtype == torch.float64
        assert model(PROMPTS["input_ids"][:, :3], **{CACHE: cache}).logits.dtype == torch.float64


@pytest.mark.parametrize("inner", [torch.bfloat16, torch.float16])
def test_one_autocast_within_another(inner):
    model = tiny_model()
    outer = torch.float16 if inner == torch.bfloat16 else torch.bfloat16
    model.forward = MethodType(torch.autocast("cpu", inner)(model.forward.__func__), model)
    with fd.enabled(model), torch.autocast("cpu", outer):
        assert model.generate(**PROMPTS, **CALL).shape == (6, 80)
        assert fd.explain(model).last_call.path == "shared", fd.explain(model).last_call.reason


def prepared(model, device="cuda"):
    """What `accelerator.prepare(model)` does to a model's forward."""
    inner = torch.autocast(device, torch.bfloat16)(model.forward.__func__)
    model.forward = MethodType(convert_outputs_to_fp32(inner), model)
    return model


def test_dtype_of_passes(accelerator):
    model, wide = tiny_model(), tiny_model().double()
    assert computes_in(model) == torch.float32
    with autocast():
        assert (computes_in(model), computes_in(wide)) == (torch.bfloat16, torch.float64)
    for enabled_first in (True, False):
        own = accelerator.prepare(fd.enable(tiny_model()) if enabled_first else tiny_model())
        assert computes_in(fd.enable(accelerator.unwrap_model(own))) == torch.bfloat16
        with torch.autocast("cpu", torch.float16):
            assert computes_in(own) == torch.bfloat16
            assert torch.get_autocast_dtype("cpu") == torch.float16


def test_autocast_ends_with_a_call_of_another_loop(accelerator):
    """Which prefills in a `forward` that has entered autocast, and enters it again."""
    model = accelerator.prepare(fd.enable(tiny_model(), min_saved_tokens=1))
    model.generate(**PROMPTS, num_beams=2, max_new_tokens=4)
    assert fd.explain(model).last_call.path == "shared"
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("way", ["around", "prepared"])
def test_casts_of_weights_end_with_a_captured_pass(way):
    """It reads none that autocast keeps, whose memory is freed, and leaves none, which a capture does not compute."""
    model, ids = tiny_model(), PROMPTS["input_ids"]
    weight = model.lm_head.weight
    if way == "prepared":
        prepared(model, "cpu")

    def logits(factor=1):
        weight.copy_(own * factor)
        return model(ids, use_cache=False).logits

    with torch.no_grad():
        own = weight.clone()
        with autocast():
            once = logits()
            assert torch.equal(logits(2), once)  # by the cast that is kept
            with casting_anew(model):
                assert torch.equal(logits(2), 2 * once)
                assert torch.equal(logits(4), 4 * once)
            assert torch.equal(logits(8), once)
        with autocast():
            with casting_anew(model):
                logits()
            assert torch.equal(logits(2), 2 * once)


@on_the_cpu
def test_captured_steps_are_of_one_autocast(uncaptured, monkeypatch):
    """Calls in and out of autocast by turns; weights in fp32 are cast as they are at each step."""
    monkeypatch.setattr(captured_prefill, "_SIZES", ())  # whose logits are rounded otherwise
    model, options = tiny_model(**SMALL), {"backend": "triton", "min_saved_tokens": 1, "min_shared_tokens": 8}
    call = ragged_prompts(24, 20, shared=16) | LOGITS | {"max_new_tokens": 3}

    def logits(inside):
        with torch.autocast("cpu", torch.float16, enabled=inside):  # as interpreted kernels round bf16 otherwise
            return torch.stack(model.generate(**call).logits)

    def change(factor):
        with torch.no_grad():
            model.lm_head.weight.mul_(factor)

    with fd.enabled(model, mode="eager", **options):
        expected = {inside: logits(inside) for inside in (True, False)}
    assert 0 < (expected[True] - expected[False]).abs().max() < 0.02
    with fd.enabled(model, mode="graph", **options):
        for inside in (True, False, True):
            found, report = logits(inside), fd.explain(model).last_call
            assert torch.equal(found, expected[inside])
            assert report.mode == "graph"
            assert report.mode_reason.endswith("casts float32 weights to float16") is inside
        change(4)
        assert torch.equal(logits(True), 4 * expected[True])
        assert state_of(model).captures.count == 2


NAMES = ["llama-gqa", "gpt_oss", "qwen3", "gpt2"]


def on_a_gpu(name, dtype, way):
    """A model in eval mode whose `forward` enters autocast, unless this is around its calls."""
    width = {"n_embd": 256} if name == "gpt2" else {"hidden_size": 256}
    model = tiny_model(name, **width).to("cuda", dtype)
    return prepared(model) if way == "prepared" else model


def around(way="around"):
    return torch.autocast("cuda", torch.bfloat16, enabled=way == "around")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "way"), [*((name, "around") for name in NAMES), ("llama-gqa", "prepared")])
def test_captured_steps_under_autocast(name, way, dtype):
    model, plain = on_a_gpu(name, dtype, way), on_a_gpu(name, dtype, "around")
    call = {key: value.cuda() for key, value in PROMPTS.items()} | CALL | LOGITS | {"max_new_tokens": 100}
    counts = set()
    with fd.enabled(model, mode="graph", backend="triton"):
        for seed in range(3):  # a capture of steps serves the second call, and one of prefill the third
            torch.manual_seed(seed)
            with around(way):
                out = model.generate(**call)
            report = fd.explain(model).last_call
            assert (report.path, report.mode) == ("shared", "graph"), str(fd.explain(model))
            assert ("casts float32 weights" in report.mode_reason) is (dtype == torch.float32)
            ours, stock = errors(plain, out)
            assert 0 < ours <= 2 * stock
            counts.add(state_of(model).captures.count)
    assert len(counts) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["around", "prepared"])
def test_captured_steps_follow_weights_that_change_in_place(way, dtype):
    model, plain = on_a_gpu("llama-gqa", dtype, way), on_a_gpu("llama-gqa", dtype, "around")
    call = {key: value.cuda() for key, value in PROMPTS.items()} | CALL | LOGITS | {"max_new_tokens": 20}
    with fd.enabled(model, mode="graph", backend="triton"):
        for factor in (1, 4, 4):
            with torch.no_grad():
                for one in (model, plain):
                    one.lm_head.weight.mul_(factor)
                    one.model.layers[0].mlp.down_proj.weight.mul_(factor)
            with around(way):
                out = model.generate(**call)
            ours, stock = errors(plain, out)
            assert 0 < ours <= 2 * stock
        assert state_of(model).captures.count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["around", "prepared"])
def test_captures_own_their_casts(way, monkeypatch):
    """They read none that autocast kept and freed, and leave none that is not computed, within one autocast or two."""
    monkeypatch.setattr(captured_prefill, "_SIZES", ())  # whose logits are rounded otherwise
    model = on_a_gpu("llama-gqa", torch.float32, way)
    ids = PROMPTS["input_ids"][:1].cuda()
    call = {"max_new_tokens": 20, "do_sample": False} | LOGITS
    with torch.no_grad(), fd.enabled(model, mode="graph", backend="triton"):
        with around():
            expected = model(ids, use_cache=False).logits  # keeps casts of all weights
        with around():
            first = model.generate(ids, **call)
            assert torch.equal(model(ids, use_cache=False).logits, expected)
        torch.cuda.synchronize()
        spoilt = [
            torch.full_like(one, torch.nan, dtype=torch.bfloat16) for one in model.parameters() for _ in range(8)
        ]
        with around():
            model(ids, use_cache=False)
            second = model.generate(ids, **call)
        del spoilt
        assert state_of(model).captures.count == 1
    assert torch.equal(torch.stack(first.logits), torch.stack(second.logits))


@pytest.mark.gpu
def test_calls_in_and_out_of_autocast_by_turns():
    model = on_a_gpu("llama-gqa", torch.float16, "around")  # which autocast's dtype is not
    call = {"input_ids": PROMPTS["input_ids"][:1].cuda(), "max_new_tokens": 40, "do_sample": False} | LOGITS
    with fd.enabled(model, mode="graph", backend="triton"):
        for inside in (True, True, True, False, False, False, True, False, False):  # some begin their prefill ahead
            with around() if inside else torch.no_grad():
                out = model.generate(**call)
            report = fd.explain(model).last_call
            assert report.mode == "graph", report.mode_reason
            assert out[CACHE].layers[0].dtype == (torch.bfloat16 if inside else torch.float16)
            assert not torch.stack(out.logits).isnan().any()
        assert state_of(model).captures.count == 2
