"""Suffixes of slim models by `slim_decode` with `enable`: tokens and logits beside those of PyTorch's operators."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.torch_operators.operators import BackendError
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.kernels import failures
from hf_fastdecode.kernels.installed import triton_is_installed
from hf_fastdecode.patches.layers import attention_layer, rotation

from ..tiny_models import seeded, tiny_model
from .family_models import NOT_BY_KERNEL, PLANS, family_model, family_pair
from .slim_models import CALLS, PROMPTS, TEXT, pair, relative

needs_kernels = pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")


def assert_like_pytorch(model: PreTrainedModel, slim: PreTrainedModel, texts: Tensor, **backends: str) -> None:
    """Logits after forced tokens: with the kernel, at most twice the error of PyTorch's operators."""
    errors, oracle = {}, copy.deepcopy(model).double()(texts).logits[:, -1:]
    for name, backend in backends.items():
        with fd.enabled(slim, backend=backend):
            cache = fd.prefill(slim, texts[:, :20])
            for token in texts[:, 20:].split(1, 1):
                logits = slim(token, **{CACHE: cache}).logits
        errors[name] = relative(logits, oracle)
    assert errors["kernel"] < 2 * errors["pytorch"]


@needs_kernels
@pytest.mark.parametrize(
    ("name", "plan"), [("gpt2", "k"), ("gpt_neox", "k+r"), ("qwen2", "mixed"), ("stablelm", "mixed")]
)
def test_suffixes_by_kernel(name: str, plan: str) -> None:
    """Without RoPE, with partial RoPE, and with biases, beside layers that keep values."""
    model, slim = family_pair(name, plan)
    call = {**CALLS["samples"], "num_return_sequences": 2, "max_new_tokens": 5}
    stock = seeded(lambda: model.generate(**PROMPTS, **call))
    with fd.enabled(slim, backend="triton"):
        assert torch.equal(seeded(lambda: slim.generate(**PROMPTS, **call)), stock)
        assert "slim suffixes by slim_decode" in fd.explain(slim).last_call.layers[-1]


@needs_kernels
@pytest.mark.parametrize(
    ("name", "plan", "cache_dtype"),
    [("gpt2", "k", "fp8"), ("gpt_neox", "k+r", "int8"), ("qwen2", "mixed", "int8")],
)
def test_suffixes_in_8_bits_by_kernel(name: str, plan: str, cache_dtype: str) -> None:
    """Tokens of the same model by PyTorch's operators, on rows of equal and of different lengths."""
    slim = to_slim(family_model(name), TEXT, plan=PLANS[plan], cache_dtype=cache_dtype, tolerance=1e9)
    call = {**CALLS["samples"], "num_return_sequences": 2, "max_new_tokens": 5}
    with fd.enabled(slim, backend="plain"):
        expected = seeded(lambda: slim.generate(**PROMPTS, **call))
        assert "slim suffixes by PyTorch's operators" in fd.explain(slim).last_call.layers[-1]
    with fd.enabled(slim, backend="triton"):
        assert torch.equal(seeded(lambda: slim.generate(**PROMPTS, **call)), expected)
        assert "slim suffixes by slim_decode" in fd.explain(slim).last_call.layers[-1]


@needs_kernels
@torch.no_grad()
def test_the_kernel_copies_no_suffix_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is handed views of the cache, behind whose tokens a row has bytes of any value."""
    from hf_fastdecode.kernels.slim_decode import api

    slim = to_slim(pair("k+r")[0], TEXT, plan=PLANS["k+r"], cache_dtype="int8", tolerance=1e9)
    logits, handed = {}, []
    launch = api.launch_all
    monkeypatch.setattr(api, "launch_all", lambda given, *rest: (handed.append(given), launch(given, *rest)))
    for backend in ("triton", "plain"):
        with fd.enabled(slim, backend=backend):
            cache = fd.prefill(slim, TEXT[None, :20])
            cache.batch_repeat_interleave(2)
            for tokens in TEXT[20:28].view(4, 2, 1):
                slim(tokens, **{CACHE: cache})
            cache.drop_last([3, 0])
            for layer in cache.layers:
                for part in layer.storage.suffix:
                    part[0, :, 1:] = 255  # NaN as a scale
            handed.clear()
            logits[backend] = slim(TEXT[28:30].view(2, 1), **{CACHE: cache}).logits
            assert len(handed) == (2 if backend == "triton" else 0)
            memory = {part.untyped_storage().data_ptr() for layer in cache.layers for part in layer.storage.suffix}
            views = [part for given in handed for part in (given.keys, given.coordinates, *given.scales)]
            assert {part.untyped_storage().data_ptr() for part in views} <= memory
    assert relative(logits["triton"], logits["plain"]) < 1e-5


@needs_kernels
def test_a_kernel_that_fails_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fastdecode.kernels.slim_decode import launches

    model, slim = pair("k+r")
    stock = seeded(lambda: model.generate(**PROMPTS, **CALLS["samples"]))
    monkeypatch.setattr(failures, "_failures", {})
    monkeypatch.setattr(launches, "slim_partials", None)
    monkeypatch.setattr(attention_layer, "takes_kernels", lambda *_: True)
    monkeypatch.setattr(rotation, "takes_kernels", lambda *_: True)
    with fd.enabled(slim):
        assert torch.equal(seeded(lambda: slim.generate(**PROMPTS, **CALLS["samples"])), stock)
        assert "slim suffixes by PyTorch's operators" in fd.explain(slim).last_call.layers[-1]
    with fd.enabled(slim, backend="triton"), pytest.raises(BackendError, match="the slim decode kernel cannot run"):
        slim.generate(**PROMPTS, **CALLS["samples"])


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize(("dtype", "variant"), [(torch.float16, "plain"), (torch.bfloat16, "yarn")])
def test_kernel_in_half_precision(dtype: torch.dtype, variant: str) -> None:
    model = copy.deepcopy(pair("k+r", variant)[0]).to(dtype)
    slim = to_slim(model, TEXT, plan=PLANS["k+r"])
    # On a CPU "auto" is PyTorch's operators.
    assert_like_pytorch(model, slim, TEXT[:52].view(2, 26), kernel="triton", pytorch="auto")


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize(("dtype", "cache_dtype"), [(torch.float16, "int8"), (torch.bfloat16, "fp8")])
def test_kernel_in_8_bits_in_half_precision(dtype: torch.dtype, cache_dtype: str) -> None:
    model = copy.deepcopy(pair("k+r")[0]).to(dtype)
    slim = to_slim(model, TEXT, plan=PLANS["k+r"], cache_dtype=cache_dtype, tolerance=1e9)
    assert_like_pytorch(model, slim, TEXT[:52].view(2, 26), kernel="triton", pytorch="auto")


@needs_kernels
@pytest.mark.parametrize(("name", "plan", "options", "reason"), NOT_BY_KERNEL)
def test_forced_kernels_are_refused(name: str, plan: str, options: dict[str, Any], reason: str) -> None:
    slim = to_slim(family_model(name), TEXT, plan=PLANS[plan], **options)
    with fd.enabled(slim, backend="triton"), pytest.raises(BackendError, match=reason):
        slim.generate(**PROMPTS, **CALLS["samples"])


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("rank", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_suffixes_by_kernel_on_a_gpu(dtype: torch.dtype, rank: int, cache_dtype: str) -> None:
    """On clusters, where the GPU has them: logits after forced tokens, beside PyTorch's operators."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 512}
    model = tiny_model("llama-mha", **sizes, head_dim=64).to("cuda", dtype)
    layers = model.config.num_hidden_layers
    plan = (("k+r" if rank else "k", rank),) * layers
    slim = to_slim(model, TEXT, plan=plan, cache_dtype=cache_dtype, tolerance=1e9)
    assert_like_pytorch(model, slim, TEXT.cuda()[:240].view(2, 120), kernel="auto", pytorch="plain")
