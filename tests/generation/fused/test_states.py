"""Layers with states: the functions that run as kernels in passes of one token and of several, by kind of model."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from contextlib import nullcontext
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from transformers import DynamicCache, PreTrainedModel
from transformers.integrations import use_kernel_func_from_hub_with_fallback
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.fused import delta_nets, norms, states, trial
from hf_fastdecode.generation.fused.delta_nets import DELTA_NETS
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.norms import GATED_NORMS
from hf_fastdecode.generation.fused.states import STATES
from hf_fastdecode.kernels.state_scans import api as scans
from hf_fastdecode.kernels.state_steps import api as state_steps

from ...architectures.classes import tiny_model_of
from .half_models import DEVICE, fail

CLASSES = {
    "Qwen3_5ForCausalLM": "convolve delta_rule gated_rms_norm",
    "Qwen3NextForCausalLM": "convolve delta_rule gated_rms_norm",
    "NemotronHForCausalLM": "convolve gated_rms_norm scan",
    "FalconH1ForCausalLM": "convolve scan",
}
KINDS = (STATES, DELTA_NETS, GATED_NORMS)
OPERATORS = (*((state_steps, name) for name in ("convolve", "delta_rule", "scan")), (norms, "gated_rms_norm"))
SCANS = ("convolve", "delta_rule")
IDS = torch.arange(3, 19, device=DEVICE).view(2, 8)


def steps(model: PreTrainedModel, fused: FusedModules | None = None) -> torch.Tensor:
    """Logits of the last two tokens, one at a time behind the first six."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:, :6], **{CACHE: cache})
        with nullcontext() if fused is None else fused.installed():
            return torch.cat([model(ids[:, None], **{CACHE: cache}).logits for ids in IDS[:, 6:].T], 1)


def passes(model: PreTrainedModel, fused: FusedModules | None = None) -> torch.Tensor:
    """Logits of a prompt of several tokens, with padding before that of the second row, and of tokens behind it."""
    cache = DynamicCache(config=model.config)
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    with torch.no_grad(), nullcontext() if fused is None else fused.installed():
        first = model(IDS[:, :5], attention_mask=mask[:, :5], **{CACHE: cache}).logits[:, 2:]
        return torch.cat([first, model(IDS[:, 5:], attention_mask=mask, **{CACHE: cache}).logits], 1)


def of_states(model: PreTrainedModel) -> FusedModules:
    """The layers with states and their norms, and no other modules."""
    return FusedModules(model, found=[one for one in FusedModules(model).found if one.kind in KINDS])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for module, name in OPERATORS:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    for name in SCANS:
        monkeypatch.setattr(scans, name, counted(f"{name} of tokens", getattr(scans, name)))
    return counts


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM", "OlmoHybridForCausalLM"])
def test_same_logits_of_several_tokens(name: str, launched: Counter[str]) -> None:
    """Error against fp32 at most 1.1 times that of the model's own code; a prompt, and what continues its states."""
    model = tiny_model_of(name).to(DEVICE)
    exact = passes(model)
    model.half()
    own, found = passes(model), passes(model, of_states(model))
    assert launched["delta_rule of tokens"] and launched["convolve of tokens"] and not launched["delta_rule"]
    own_error, error = ((one.float() - exact).pow(2).mean().sqrt() for one in (own, found))
    assert error <= 1.1 * own_error


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3NextForCausalLM"])
def test_tokens_in_fp32_would_be_stocks(name: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels do not run in fp32; if they did, prompts and steps after them would give stock's tokens."""
    model = tiny_model_of(name).to(DEVICE)
    named = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    stock = model.generate(IDS, **named)
    for module in (delta_nets, trial):
        monkeypatch.setattr(module, "runs_fused", lambda x: not torch.is_grad_enabled())
    with of_states(model).installed():
        found = model.generate(IDS, **named)
    assert launched["delta_rule of tokens"] and launched["delta_rule"]
    assert torch.equal(found.sequences, stock.sequences)
    torch.testing.assert_close(torch.cat(found.logits), torch.cat(stock.logits), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CLASSES)
def test_same_logits(name: str, launched: Counter[str]) -> None:
    """Error against fp32 at most twice that of the model's own code."""
    model = tiny_model_of(name).to(DEVICE)
    exact = steps(model)
    model.half()
    own = steps(model)
    found = steps(model, of_states(model))
    assert " ".join(sorted(launched)) == CLASSES[name]
    own_error, error = ((one.float() - exact).pow(2).mean().sqrt() for one in (own, found))
    assert error <= 2 * own_error


@pytest.mark.parametrize(
    ("name", "all_fail"), [("Qwen3NextForCausalLM", True), ("Qwen3_5ForCausalLM", True), ("Qwen3_5ForCausalLM", False)]
)
def test_kernels_that_fail_leave_the_models_own_functions(
    name: str, all_fail: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one fails after another has moved its states."""
    model = tiny_model_of(name).half().to(DEVICE)
    for module, operator in OPERATORS:
        if all_fail or operator == "delta_rule":
            monkeypatch.setattr(module, operator, fail)
    if all_fail:
        for operator in SCANS:
            monkeypatch.setattr(scans, operator, fail)
    for run in (passes, steps):
        own, found = run(model), run(model, of_states(model))
        torch.testing.assert_close(found, own, rtol=0 if all_fail else 0.02, atol=0 if all_fail else 0.02)


def test_what_fails_behind_the_scan_leaves_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's own code then runs from the states before."""
    model = tiny_model_of("Qwen3_5ForCausalLM").half().to(DEVICE)
    own, fused = passes(model), of_states(model)
    (net, *_) = (one for one in model.modules() if hasattr(one, "in_proj_qkv"))
    forward, calls = torch.nn.functional.linear, iter(range(9))

    def fails_at_first(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if weight is net.out_proj.weight and next(calls) % 2 == 0:
            raise ValueError("of other shapes")
        return forward(x, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", fails_at_first)
    torch.testing.assert_close(passes(model, fused), own, rtol=0.02, atol=0.02)
    assert next(calls) == 4  # two passes, each of which ran twice


def test_steps_list_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would be a launch for each layer."""
    model = tiny_model_of("Qwen3_5ForCausalLM").half().to(DEVICE)
    fused = of_states(model)
    monkeypatch.setattr(delta_nets, "starts_of_rows", fail)
    steps(model, fused)


class EightBits(torch.nn.Module):
    """A projection whose weight is of another dtype than what it computes."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().amax() / 127
        self.weight = torch.nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


def test_quantized_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model_of("Qwen3_5ForCausalLM").half().to(DEVICE)
    nets = [one for one in model.modules() if hasattr(one, "in_proj_qkv")]
    for net in nets:
        net.in_proj_qkv = EightBits(net.in_proj_qkv)
    own, whole, ran = steps(model), delta_nets._step, []
    monkeypatch.setattr(delta_nets, "_step", lambda *args: (ran.append(args[0]), whole(*args))[1])
    torch.testing.assert_close(steps(model, of_states(model)), own, rtol=0.02, atol=0.02)
    assert {id(one) for one in ran} >= {id(net) for net in nets}  # a trial is of a small one


def test_other_functions_than_those_known_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a package with kernels of its own is installed, or takes other arguments."""
    model = tiny_model_of("Qwen3NextForCausalLM").half()
    monkeypatch.setattr(modeling_qwen3_next, "causal_conv1d_update", lambda *args: args[0])
    (form,) = (one.form for one in FusedModules(model).found if one.kind is STATES)
    assert form == {"causal_conv1d_fn", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"}


@pytest.mark.parametrize("name", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "NemotronHForCausalLM"])
def test_steps_are_the_same_where_packages_are_installed(
    name: str, launched: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions of packages give way to kernels; they run where modules are not replaced, as in prompts here."""
    model = tiny_model_of(name).half().to(DEVICE)
    expected = steps(model, of_states(model))
    without = dict(launched)
    (layer,) = {type(one) for one in model.modules() if states.may_be(type(one))}
    names = inspect.unwrap(layer.forward).__globals__
    calls: Counter[str] = Counter()

    def install(package: str, *path: str, of: str, refuses: bool) -> None:
        own = names.get(of)
        if own is None:
            return

        @wraps(own)  # transformers passes the arguments that the signature has
        def of_package(*args: Any, **kwargs: Any) -> Any:
            if refuses:
                raise RuntimeError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
            calls[path[-1]] += 1
            return own(*args, **kwargs)

        module = ModuleType(package)
        held: Any = of_package
        for part in reversed(path[1:]):
            held = SimpleNamespace(**{part: held})
        setattr(module, path[0], held)
        monkeypatch.setitem(sys.modules, package, module)
        decorated = use_kernel_func_from_hub_with_fallback(path[-1], package)(inspect.unwrap(own))
        monkeypatch.setitem(names, of, decorated)

    for function, refuses in (("causal_conv1d_update", True), ("causal_conv1d_fn", False)):
        install("causal_conv1d", function, of=function, refuses=refuses)
    delta = "ops", "gated_delta_rule"
    install("fla", *delta, "fused_recurrent_gated_delta_rule", of="torch_recurrent_gated_delta_rule", refuses=True)
    install("fla", *delta, "chunk_gated_delta_rule", of="torch_chunk_gated_delta_rule", refuses=False)
    mamba = "ops", "triton", "selective_state_update", "selective_state_update"
    install("mamba_ssm", *mamba, of="mamba2_selective_state_update", refuses=True)
    launched.clear()
    found = steps(model, of_states(model))
    assert calls["causal_conv1d_fn"]
    assert calls["chunk_gated_delta_rule"] or "mamba2_selective_state_update" in names
    assert launched == without
    assert torch.equal(found, expected)
    calls.clear()
    with of_states(model).installed(), torch.no_grad():
        model(IDS[:1], use_cache=True)
    assert not calls
