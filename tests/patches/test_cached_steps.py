"""Decode steps of slim models in transformers' own loop and caches, whose tokens `slim_decode` reads on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.kernels import failures
from hf_fastdecode.kernels.installed import triton_is_installed
from hf_fastdecode.patches.layers import kernel_attention, rotation

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .family_models import PLANS, family_pair
from .slim_models import TEXT, pair, relative

pytestmark = pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")
PADDED = ragged_prompts(20, 13)
STEPS = 4


@pytest.fixture
def averaged(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """First slots of rows at each run of the kernel, which is interpreted on a CPU, as on a GPU it is not."""
    runs: list[Tensor | None] = []
    averages = kernel_attention.averages_by_kernel

    def recorded(*given: Any) -> Any:
        found = averages(*given)
        runs.append(given[5])
        return found

    monkeypatch.setattr(kernel_attention, "averages_by_kernel", recorded)
    if not torch.cuda.is_available():
        for module in (kernel_attention, rotation):
            monkeypatch.setattr(module, "takes_kernels", lambda *_: True)
    return runs


def generate(model: PreTrainedModel, prompt: dict[str, Tensor], **call: Any) -> Tensor:
    call = {"max_new_tokens": STEPS + 1, "min_new_tokens": STEPS + 1, "do_sample": False} | call
    return seeded(lambda: model.generate(**prompt, **call))


@pytest.mark.parametrize("call", [{}, {"num_beams": 2}, {"do_sample": True, "top_k": 0}], ids=str)
@pytest.mark.parametrize("prompt", [PADDED, {"input_ids": TEXT[None, :20]}], ids=["padded", "alone"])
def test_tokens_are_those_of_the_ordinary_model(averaged, prompt: dict[str, Tensor], call: dict[str, Any]) -> None:
    model, slim = pair("k+r")
    assert torch.equal(generate(slim, prompt, **call), generate(model, prompt, **call))
    assert len(averaged) == STEPS * len(slim.model.layers)
    expected = (PADDED["attention_mask"] == 0).sum(1).tolist() if prompt is PADDED else None
    for starts in averaged:
        assert (starts if starts is None else starts.unique().tolist()) == (expected and sorted(set(expected)))


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen2", "phi3-window"])
def test_families(averaged, name: str) -> None:
    """Without RoPE, with partial RoPE, with biases, and with a window that hides the oldest tokens."""
    model, slim = family_pair(name, "k")
    prompt = ragged_prompts(30, 70) if name == "phi3-window" else PADDED
    assert torch.equal(generate(slim, prompt), generate(model, prompt))
    assert len(averaged) == STEPS * 2


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_8_bits(averaged, monkeypatch: pytest.MonkeyPatch, cache_dtype: str) -> None:
    slim = to_slim(pair("k+r")[0], TEXT, plan=PLANS["k+r"], cache_dtype=cache_dtype, tolerance=1e9)
    found = generate(slim, PADDED)
    assert len(averaged) == STEPS * len(slim.model.layers)
    monkeypatch.setattr(kernel_attention, "takes_kernels", lambda *_: False)
    assert torch.equal(found, generate(slim, PADDED))


@torch.no_grad()
def test_static_caches_and_masks_of_transformers(averaged) -> None:
    """Their free slots are hidden, as tokens of padding are."""
    model, slim = pair("k+r")
    options = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(slim, PADDED, **options), generate(model, PADDED, **options))
    assert len(averaged) == STEPS * len(slim.model.layers)


@torch.no_grad()
def test_a_mask_is_looked_at_once_in_a_pass(averaged, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Tensor] = []
    range_of = kernel_attention._range_of
    monkeypatch.setattr(kernel_attention, "_range_of", lambda seen: looked.append(seen) or range_of(seen))
    generate(pair("k+r")[1], PADDED)
    assert len(looked) == STEPS
    assert len(kernel_attention._seen) == 0


@torch.no_grad()
@pytest.mark.parametrize("hidden", ["gap", "all", "added"])
def test_masks_that_the_kernel_does_not_take(averaged, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    slim, cache = pair("k+r")[1], DynamicCache()
    slim(TEXT[None, :20], **{CACHE: cache})
    mask = torch.ones(1, 1, 1, 21, dtype=torch.bool)
    mask[..., 7:9] = False
    if hidden == "all":
        mask[:] = False
    if hidden == "added":
        mask = torch.zeros(1, 1, 1, 21).masked_fill(~mask, torch.finfo(torch.float32).min)
    logits = slim(TEXT[None, 20:21], attention_mask=mask, **{CACHE: cache}).logits
    assert not averaged
    assert logits.isfinite().all()


@pytest.mark.parametrize("way", ["gradients", "several", "eager", "threshold", "inputs", "interleaved"])
def test_steps_of_pytorchs_operators(averaged, way: str) -> None:
    model, slim = pair("k")
    if way in ("inputs", "interleaved"):
        model, slim = family_pair("gpt2", "x") if way == "inputs" else family_pair("codegen", "k")
    slim = copy.deepcopy(slim)
    if way == "eager":
        slim.set_attn_implementation("eager")
    slim.config.slim_sparsity_threshold = 1e-9 if way == "threshold" else 0.0
    cache, count = DynamicCache(), 2 if way == "several" else 1
    with torch.set_grad_enabled(way == "gradients"):
        slim(TEXT[None, :20], **{CACHE: cache})
        found = slim(TEXT[None, 20 : 20 + count], **{CACHE: cache}).logits
    expected = model(TEXT[None, : 20 + count]).logits[:, -count:]
    assert not averaged
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def test_inference_mode(averaged) -> None:
    model, slim = pair("k+r")
    with torch.inference_mode():
        assert torch.equal(generate(slim, PADDED), generate(model, PADDED))
    assert averaged


def test_a_kernel_that_fails_gives_way(averaged, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fastdecode.kernels.slim_decode import launches

    model, slim = pair("k+r")
    monkeypatch.setattr(failures, "_failures", {})
    monkeypatch.setattr(launches, "slim_partials", None)
    assert torch.equal(generate(slim, PADDED), generate(model, PADDED))
    assert not averaged


@torch.no_grad()
def errors(slim: PreTrainedModel, oracle: Tensor, text: Tensor, mask: Tensor | None) -> float:
    """Error of the logits of the tokens behind the first 40, forced one by one."""
    cache, logits = DynamicCache(), []
    for start, end in [(0, 40), *((at, at + 1) for at in range(40, text.shape[1]))]:
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        if mask is not None:
            seen["position_ids"] = (mask[:, :end].cumsum(1) - 1).clamp(0)[:, start:]
        logits.append(slim(text[:, start:end], **{CACHE: cache}, **seen).logits[:, -1:])
    return relative(torch.cat(logits[1:], 1), oracle)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("plan", ["k", "k+r"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_on_a_gpu(averaged, monkeypatch, dtype, plan: str, cache_dtype: str, padded: bool) -> None:
    """At most twice the error of PyTorch's operators, over heads as clusters take them."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = tiny_model("llama-mha", **sizes).to("cuda", dtype)
    plan = (("k+r", 64), ("k+r", 32)) if plan == "k+r" else plan
    slim = to_slim(model, TEXT, plan=plan, cache_dtype=cache_dtype, tolerance=1e9)
    text, mask = TEXT[:120].view(2, 60).cuda(), None
    if padded:
        mask = torch.ones_like(text)
        mask[1, :9] = 0
    positions = {} if mask is None else {"position_ids": (mask.cumsum(1) - 1).clamp(0)}
    with torch.no_grad():
        oracle = copy.deepcopy(model).double()(text, attention_mask=mask, **positions).logits[:, 40:]
    by_kernel = errors(slim, oracle, text, mask)
    assert len(averaged) == 20 * len(slim.model.layers)
    monkeypatch.setattr(kernel_attention, "takes_kernels", lambda *_: False)
    assert by_kernel < 2 * errors(slim, oracle, text, mask)
    assert len(averaged) == 20 * len(slim.model.layers)
