"""Calls under autocast share: around the call, or within a `forward` that accelerate has wrapped."""

import copy
from types import MethodType

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import convert_outputs_to_fp32

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..tiny_models import ragged_prompts, tiny_model

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


def prepared(model):
    """What `accelerator.prepare(model)` does to a model's forward on a GPU."""
    inner = torch.autocast("cuda", torch.bfloat16)(model.forward.__func__)
    model.forward = MethodType(convert_outputs_to_fp32(inner), model)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "way", "mode"),
    [
        (torch.float32, "prepared", "eager"),
        (torch.float32, "around", "eager"),
        (torch.bfloat16, "prepared", "graph"),
        (torch.bfloat16, "around", "eager"),
    ],
)
def test_kernels_and_captured_steps_under_autocast(dtype, way, mode):
    """Weights in fp32 take the kernels; those in half precision are captured where `forward` enters autocast."""
    plain = tiny_model(hidden_size=256).to("cuda", dtype)
    model = fd.enable(tiny_model(hidden_size=256).to("cuda", dtype))
    if way == "prepared":
        model = prepared(model)
    fd.enable(model, mode="auto" if mode == "eager" else mode, backend="triton")
    call = {key: value.cuda() for key, value in PROMPTS.items()} | CALL | LOGITS | {"max_new_tokens": 100}
    for seed in range(2):  # a capture serves the second
        torch.manual_seed(seed)
        with torch.autocast("cuda", torch.bfloat16, enabled=way == "around"):
            out = model.generate(**call)
        report = fd.explain(model).last_call
        assert (report.path, report.mode) == ("shared", mode), str(fd.explain(model))
        assert "triton" in report.layers[0]
        if way == "around" and dtype == torch.bfloat16:
            assert report.mode_reason == "torch.autocast is active around the call"
        ours, stock = errors(plain, out)
        assert 0 < ours <= 2 * stock
