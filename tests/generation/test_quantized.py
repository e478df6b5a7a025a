"""Quantized weights, as other packages store them: wrappers around tensors, and numbers packed into bytes."""

from __future__ import annotations

from collections import UserDict
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE, stored_parts
from hf_fastdecode.generation import foreign_code
from hf_fastdecode.generation.foreign_code import is_set_once
from hf_fastdecode.generation.prompts.gain import _elements
from hf_fastdecode.generation.snapshot import captured_state

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .calls import PROMPT, SAMPLING, as_in_stock

CALL = ragged_prompts(41, 36, shared=33) | {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 3}


class Scaled(Tensor):
    """Eight bits and a scale for each row, as torchao's tensors: a wrapper, which has no memory of its own."""

    qdata: Tensor
    scale: Tensor
    act_quant_kwargs: Any = None
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, qdata: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype)
        made.qdata, made.scale = qdata, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> Scaled:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].qdata, args[0].scale)
        plain = [one.qdata * one.scale if isinstance(one, Scaled) else one for one in args]
        return func(*plain, **(kwargs or {}))


class Packed(nn.Linear):
    """Two elements to a byte, with a scale beside: of this weight's memory no kernel may make a product."""

    def __init__(self, linear: nn.Linear):
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = linear.weight.detach().abs().amax() / 7
        four = (linear.weight.detach() / self.scale).round().add(8).to(torch.uint8).view(-1, 2)
        self.weight = nn.Parameter(four[:, :1] * 16 + four[:, 1:], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        four = torch.cat([self.weight // 16, self.weight % 16], 1).view(self.out_features, -1)
        return nn.functional.linear(x, (four.to(x.dtype) - 8) * self.scale)


def wrap(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(Scaled.of(linear.weight.detach()), requires_grad=False)
    return linear


def quantized(how: Any) -> Any:
    model = tiny_model("llama-gqa")
    for parent in [module for module in model.model.layers.modules() if not isinstance(module, nn.Linear)]:
        for name, part in parent.named_children():
            if isinstance(part, nn.Linear):
                setattr(parent, name, how(part))
    return model


@pytest.fixture(autouse=True)
def known_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of this file are those of a package that is known."""
    monkeypatch.setattr(foreign_code, "_KNOWN_CODE", (*foreign_code._KNOWN_CODE, __name__))


@pytest.fixture
def wrapped() -> Any:
    return quantized(wrap)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("how", [wrap, Packed])
def test_tokens_are_stocks(how, mode, uncaptured):
    if mode == "graph" and torch.cuda.is_available():
        pytest.skip("the kernels take float32 only where they are interpreted")
    model = quantized(how)
    stock = seeded(lambda: model.generate(**CALL))
    backend = {"backend": "triton"} if mode == "graph" else {}
    with fd.enabled(model, mode=mode, min_saved_tokens=1, **backend):
        assert torch.equal(seeded(lambda: model.generate(**CALL)), stock)
        assert fd.explain(model).last_call.path == "shared"
        assert fd.explain(model).last_call.mode == mode


def test_what_a_capture_reads_is_noticed(wrapped):
    """A wrapper's address is 0, whatever it wraps."""
    projection, before = wrapped.model.layers[0].mlp.up_proj, captured_state(wrapped, [])
    assert projection.weight.data_ptr() == 0 and captured_state(wrapped, []) == before
    old, projection.weight.data.qdata = projection.weight, projection.weight.qdata
    projection.weight = nn.Parameter(Scaled(old.qdata.clone(), old.scale), requires_grad=False)
    assert captured_state(wrapped, []) != before
    projection.weight = old
    assert captured_state(wrapped, []) == before


@pytest.mark.parametrize("how", [wrap, Packed])
@pytest.mark.parametrize("change", ["replaced", "in place"])
def test_a_kept_cache_is_of_the_quantized_weights(how, change):
    model = quantized(how)
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})
        projection = model.model.layers[0].mlp.up_proj
        if change == "in place":
            stored_parts(projection.weight)[0].flatten()[5:6].add_(1)
        else:
            projection.weight = how(nn.Linear(projection.in_features, projection.out_features)).weight
        with pytest.raises(ValueError, match="the cache was made with other weights"):
            model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})


def test_scales_of_packed_weights_are_parts_of_them():
    """As of bitsandbytes, which stores them in an attribute of the parameter, quantized or not."""
    weight = nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    assert stored_parts(weight) == [weight]

    class Params4bit(nn.Parameter):
        pass

    packed, scales, of_scales = Params4bit(weight, requires_grad=False), torch.ones(2), torch.ones(1)
    packed.quant_state = SimpleNamespace(absmax=scales, state2=SimpleNamespace(absmax=of_scales), shape=(4, 4))
    assert [id(one) for one in stored_parts(packed)] == [id(packed), id(scales), id(of_scales)]
    packed.quant_state.state2 = None
    assert len(stored_parts(packed)) == 2
    assert (_elements(packed), _elements(weight)) == (16, 8)


def test_a_forward_that_transformers_sets_once():
    """Before 5.24 gpt-oss' layers with experts in MXFP4 have one of their own, which is captured."""
    own = FunctionType(nn.Identity.forward.__code__, {"__name__": "transformers.integrations.mxfp4"})
    assert is_set_once(MethodType(own, nn.Identity()))
    assert not is_set_once(MethodType(test_a_forward_that_transformers_sets_once, nn.Identity()))


def test_parameters_in_a_mapping_of_their_own(model):
    """As of compressed-tensors, which may keep them elsewhere."""
    layers = [one for one in model.modules() if isinstance(one, nn.Linear)]
    own = [vars(one)["_parameters"] for one in layers]
    for one in layers:
        vars(one)["_parameters"] = UserDict(vars(one)["_parameters"])
    try:
        assert as_in_stock(model, lambda: model.generate(**PROMPT, **SAMPLING), "shared")
    finally:
        for one, parameters in zip(layers, own, strict=True):
            vars(one)["_parameters"] = parameters


class Linear8bitLt(nn.Linear):
    """As bitsandbytes' layer: features of which any token has an outlier are multiplied otherwise, for all tokens."""

    def __init__(self, linear: nn.Linear, threshold: float):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight, self.state = linear.weight, SimpleNamespace(threshold=threshold)


Linear8bitLt.__module__ = "bitsandbytes.nn.modules"


@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_outliers_of_other_tokens(threshold):
    model = quantized(lambda linear: Linear8bitLt(linear, threshold))
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        last = fd.explain(model).last_call
    assert last.path == ("stock" if threshold else "shared")
    assert ("find outlier features over all tokens" in last.reason) == bool(threshold)


@pytest.mark.parametrize("granularity", ["PerTensor", "PerRow"])
def test_scales_of_all_tokens(wrapped, granularity):
    """As of torchao's activations in float8, whose scale is by default that of a pass."""
    given = SimpleNamespace(granularity=type(granularity, (), {})())
    wrapped.model.layers[1].mlp.down_proj.weight.act_quant_kwargs = given
    with fd.enabled(wrapped):
        wrapped.generate(**PROMPT, **SAMPLING)
        assert fd.explain(wrapped).last_call.path == ("stock" if granularity == "PerTensor" else "shared")
        if granularity == "PerTensor":
            with pytest.raises(ValueError, match="one scale for all tokens"):
                fd.prefill(wrapped, PROMPT)
