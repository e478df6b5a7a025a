"""What modules must not lose where kernels run in their place: hooks, decorators, settings, and their own weights."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import cached_property
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

pytest.importorskip("triton")

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.norms import WaitingSums
from hf_fastdecode.generation.snapshot import ModelWalk, ModelWatch, captured_state
from hf_fastdecode.generation.structure import Structure
from hf_fastdecode.generation.support import check_state

from .half_models import DEVICE, check_fused, half, logits

PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "norm": lambda model: model.model.layers[0].input_layernorm,
    "gated": lambda model: model.model.layers[0].mlp,
    "activation": lambda model: model.model.layers[0].mlp.act_fn,
    "attention": lambda model: model.model.layers[0].self_attn,
}


def scaled(output: Any) -> Any:
    return (output[0] * 2, *output[1:]) if isinstance(output, tuple) else output * 2


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["hook", "forward"])
def test_code_that_comes_between_passes(place: str, how: str) -> None:
    """Hooks and methods of an instance run, also those that were put there after the modules were found."""
    model = half()
    module = PLACES[place](model)
    with FusedModules(model).installed():
        if how == "hook":
            module.register_forward_hook(lambda module, inputs, output: scaled(output))
        else:
            own = module.forward
            module.forward = MethodType(lambda self, *args, **kwargs: scaled(own(*args, **kwargs)), module)
        found = logits(model)
    torch.testing.assert_close(found, logits(model), rtol=0, atol=2e-2)


def test_hooks_of_activations_see_no_trial() -> None:
    model, seen = half(), []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[-1]))
    fused = FusedModules(model)
    assert not seen
    with fused.installed():
        logits(model)
    assert seen == [model.config.intermediate_size] * len(model.model.layers)


def test_activation_replaced_between_passes() -> None:
    model = half()
    with FusedModules(model).installed():
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.ReLU()
        found = logits(model)
    torch.testing.assert_close(found, logits(model), rtol=0, atol=2e-2)


def test_global_hooks() -> None:
    model, seen = half(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *args: seen.append(module))
    try:
        logits(model)
        expected, seen[:] = list(seen), []
        with FusedModules(model).installed():
            logits(model)
    finally:
        handle.remove()
    assert seen == expected


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that does something, as transformers' does that renames arguments."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        output, weights = function(*args, **kwargs)
        return output * 2, weights

    return wrapped


def test_decorators_of_attention_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = half()
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", doubled(modeling_llama.LlamaAttention.forward))
    assert any(isinstance(module, modeling_llama.LlamaAttention) for module in FusedModules(model).modules)
    check_fused(model)


def test_globals_of_attention_replaced_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, own = half(), modeling_llama.ALL_ATTENTION_FUNCTIONS
    check_fused(model)
    others = SimpleNamespace(get_interface=lambda *args: doubled(own.get_interface(*args)))
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", others)
    check_fused(model)


def test_strided_weight() -> None:
    """A weight that is a column of a matrix: the model's own code runs."""
    model = half()
    model.model.norm.weight = nn.Parameter(torch.rand(64, 2, device=DEVICE).half()[:, 0])
    check_fused(model)
    check_fused(model, WaitingSums())


class OwnTensor(torch.Tensor):
    """Stands for tensors whose memory no kernel may read as it lies there."""


def test_weights_of_other_classes() -> None:
    model = half()
    norm = model.model.norm
    norm.weight = nn.Parameter(norm.weight.detach().as_subclass(OwnTensor), requires_grad=False)
    x = torch.ones(2, 64, dtype=torch.float16, device=DEVICE)
    with torch.no_grad(), FusedModules(model).installed():
        assert type(norm(x)) is OwnTensor


class Wide(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class Back(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def test_projections_of_other_dtypes() -> None:
    """A projection that returns its sums in fp32, as some quantized ones do."""
    model = half()
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Wide
        layer.mlp.down_proj.__class__ = Back
    check_fused(model)


def test_classes_are_let_go() -> None:
    class Local(LlamaRMSNorm):
        pass

    model = half()
    model.model.norm.__class__ = Local
    FusedModules(model)
    seen = weakref.ref(Local)
    del model, Local
    gc.collect()
    assert seen() is None


def test_model_that_its_activation_refers_to_is_let_go() -> None:
    model = half()
    mlp = model.model.layers[0].mlp
    del mlp.act_fn

    def activation(x: Tensor, model: nn.Module = model) -> Tensor:
        return torch.nn.functional.silu(x)

    mlp.act_fn = activation
    FusedModules(model)
    seen = weakref.ref(model)
    del model, mlp, activation
    gc.collect()
    assert seen() is None


def test_address_of_a_sum_that_waits() -> None:
    """Who asks for the address by this interface, as CuPy does, calls no function of PyTorch's that reads it."""
    first = torch.ones(2, 8, dtype=torch.float16, device=DEVICE)
    with torch.no_grad(), WaitingSums() as sums:
        total = first + first
        assert (total.shape, total.dtype, sums.waits(total)) == ((2, 8), torch.float16, True)
        with suppress(AttributeError):  # which a CPU's tensors raise
            _ = total.__cuda_array_interface__
        assert not sums.waits(total)


def test_autocast_keeps_the_models_code() -> None:
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        check_fused(half(), atol=0)


def test_copies_made_within(tmp_path: Any) -> None:
    model = half()
    expected = logits(model)
    with FusedModules(model).installed():
        copied = deepcopy(model)
        torch.save(model, tmp_path / "model")
    assert torch.equal(logits(copied), expected)
    assert torch.equal(logits(torch.load(tmp_path / "model", weights_only=False)), expected)


class Scaled(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("change", ["number", "class"])
def test_a_loop_of_the_users_that_changes_the_model(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass of the loop runs as kernels is found anew for it."""

    def passes(fused: Any) -> list[Tensor]:
        model, found = half(), []
        for layer in model.model.layers:
            layer.mlp.__class__, layer.mlp.scale = Scaled, 1.0

        def loop(model: Any, input_ids: Tensor, **arguments: Any) -> Tensor:
            cache = arguments[CACHE]
            model(input_ids, **{CACHE: cache})
            for scale in (1.0, 1.0, 3.0):
                for layer in model.model.layers:
                    if change == "class" and scale == 3:
                        monkeypatch.setattr(Scaled, "forward", lambda self, x: self.down_proj(self.up_proj(x)))
                    layer.mlp.scale = scale if change == "number" else 1.0
                fed = torch.full((cache.rows, 1), 7, device=DEVICE)
                found.append(model(fed, **{CACHE: cache}).logits)
            return input_ids

        with monkeypatch.context() as patched:
            patched.setattr("hf_fastdecode.generation.support.check_code", lambda _: None)  # this file's classes
            kept = cached_property(fused)
            kept.__set_name__(Structure, "fused")
            patched.setattr(Structure, "fused", kept)
            ids = torch.arange(3, 43, device=DEVICE).repeat(2, 1)
            with fd.enabled(model, mode="eager", min_saved_tokens=1):
                model.generate(ids, custom_generate=loop, max_new_tokens=9)
                report = fd.explain(model).last_call
                assert report.path == "shared", report
        return found

    forward = Scaled.forward
    expected = passes(lambda structure: None)
    monkeypatch.setattr(Scaled, "forward", forward)
    found = passes(lambda structure: FusedModules(structure._model, structure.walk.modules))
    assert (expected[2] - expected[1]).abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


def test_a_model_that_is_read_while_another_thread_computes() -> None:
    model, stopped, interval = half(), threading.Event(), sys.getswitchinterval()
    configs = Structure(model).configs

    def passes() -> None:
        fused = FusedModules(model)
        while not stopped.is_set():
            with fused.installed():
                pass

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(passes)
            try:
                for _ in range(100):
                    captured_state(model, configs)
                    ModelWatch(ModelWalk(model), configs).touched()
                    FusedModules(model)
                    model.train()
                    check_state(ModelWalk(model))
            finally:
                stopped.set()
            other.result()
    finally:
        sys.setswitchinterval(interval)
