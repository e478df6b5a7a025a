"""Mamba-2's scan of several tokens in models: tokens in fp32, errors in fp16, and where others' functions run."""

from __future__ import annotations

import inspect
import sys
from contextlib import nullcontext
from functools import update_wrapper
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from transformers import DynamicCache, PreTrainedModel
from transformers.integrations import use_kernel_func_from_hub_with_fallback
from transformers.models.mamba2 import modeling_mamba2

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE, is_of_package
from hf_fastdecode.generation import structure
from hf_fastdecode.generation.fused import norms, states, trial
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.norms import GATED_NORMS
from hf_fastdecode.generation.fused.states import STATES
from hf_fastdecode.generation.prompts import by_rows
from hf_fastdecode.kernels.state_scans import api as state_scans

from ...architectures.classes import tiny_model_of
from ...tiny_models import ragged_prompts
from .half_models import DEVICE, Counted, counting, fail

IDS = torch.arange(3, 43, device=DEVICE).view(2, 20)
MASK = torch.ones_like(IDS)
MASK[1, :3] = 0


def passes(model: PreTrainedModel, fused: FusedModules | None = None, *, first: int = 0) -> Tensor:
    """Logits of prompts, the second one padded, in two passes of several tokens, and of a step."""
    cache, logits = DynamicCache(config=model.config), []
    with torch.no_grad(), nullcontext() if fused is None else fused.installed():
        for start, stop in ((0, 12), (12, 19), (19, 20)):
            mask = MASK[first:, :stop] if stop < 20 else None
            logits.append(model(IDS[first:, start:stop], attention_mask=mask, **{CACHE: cache}).logits)
    return torch.cat(logits, 1)[:, 3:]


def of_states(model: PreTrainedModel) -> FusedModules:
    return FusedModules(model, found=[one for one in FusedModules(model).found if one.kind in (STATES, GATED_NORMS)])


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return counting(monkeypatch, state_scans, "scan")


@pytest.mark.parametrize("name", ["Mamba2ForCausalLM", "NemotronHForCausalLM"])
def test_tokens_in_fp32_are_those_of_the_models_code(
    name: str, scans: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the kernels would run there: modules run them in half precision alone."""
    model = tiny_model_of(name).to(DEVICE)
    own = passes(model, first=1)
    monkeypatch.setattr(states, "runs_fused", lambda x: True)
    found = passes(model, of_states(model), first=1)
    assert scans.count
    assert torch.equal(found.argmax(-1), own.argmax(-1))
    torch.testing.assert_close(found, own, rtol=0, atol=1e-4 * float(own.std()))


def test_calls_in_fp32_continue_from_states(scans: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """What prompts begin with is scanned once, and their rests from its state, each in parts."""
    model, arguments = tiny_model_of("NemotronHForCausalLM").to(DEVICE), {"max_new_tokens": 3, "do_sample": False}
    prompts = ragged_prompts(17, 26, 26, shared=16)
    stock = model.generate(**prompts, **arguments)
    monkeypatch.setattr(states, "runs_fused", lambda x: trial._on.get())
    monkeypatch.setattr(structure, "runs_kernels", lambda _: True)
    with fd.enabled(model, min_saved_tokens=1, min_shared_tokens=8, max_prefill_tokens=12):
        assert torch.equal(model.generate(**prompts, **arguments), stock)
        assert fd.explain(model).last_call.path == "shared"
    assert scans.count


OTHERS = ["FalconH1ForCausalLM", "BambaForCausalLM", "GraniteMoeHybridForCausalLM", "Zamba2ForCausalLM"]


@pytest.mark.parametrize(
    "name", ["NemotronHForCausalLM", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in OTHERS)]
)
def test_same_logits(name: str, scans: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Error against fp32 at most 1.1 times that of the model's own code; norms take the scan's fp32."""
    normed = counting(monkeypatch, norms, "gated_rms_norm")
    model = tiny_model_of(name).to(DEVICE)
    exact = passes(model)
    model.half()
    own, found = passes(model), passes(model, of_states(model))
    assert scans.count
    assert normed.count > scans.count or name != "NemotronHForCausalLM"
    own_error, error = ((one.float() - exact).pow(2).mean().sqrt() for one in (own, found))
    assert error <= 1.1 * own_error


def test_a_kernel_that_fails_leaves_the_models_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model_of("Mamba2ForCausalLM").half().to(DEVICE)
    fused = FusedModules(model, found=[one for one in FusedModules(model).found if one.kind is STATES])
    expected = passes(model)
    monkeypatch.setattr(state_scans, "scan", fail)
    torch.testing.assert_close(passes(model, fused), expected, rtol=0, atol=0.02)


def test_functions_of_packages_and_unknown_ones_run(scans: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's function takes part in the trial as transformers' own, but is not replaced."""
    model = tiny_model_of("Mamba2ForCausalLM").half().to(DEVICE)
    own = modeling_mamba2.mamba2_chunk_scan
    of_package = update_wrapper(Counted(inspect.unwrap(own)), inspect.unwrap(own))  # with its signature
    decorated: Any = use_kernel_func_from_hub_with_fallback("mamba_chunk_scan_combined", "mamba_ssm")
    monkeypatch.setattr("transformers.integrations.hub_kernels.resolve_internal_import", lambda *_: of_package)
    monkeypatch.setitem(sys.modules, "mamba_ssm", modeling_mamba2)
    installed = decorated(inspect.unwrap(own))
    assert is_of_package(installed)
    assert not is_of_package(own)
    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", installed)
    passes(model, of_states(model))
    assert of_package.count
    mixer = next(one for one in model.modules() if states.may_be(type(one)))
    names = frozenset({"causal_conv1d_fn", "mamba2_chunk_scan"})
    assert not states._take_segments(mixer, names)  # of which the package would take none
    monkeypatch.setattr(modeling_mamba2, "mamba2_chunk_scan", lambda *args, **kwargs: own(*args, **kwargs)[:1])
    (form,) = {one.form for one in FusedModules(model).found if one.kind is STATES}
    assert "mamba2_chunk_scan" not in form
    assert not scans.count


def test_memory_of_passes_is_that_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model_of("NemotronHForCausalLM").half().to(DEVICE)
    with_kernels = []
    for runs in (False, True):
        monkeypatch.setattr(structure, "runs_kernels", lambda _, runs=runs: runs)
        with fd.enabled(model):
            with_kernels.append(by_rows.most_bytes(model, 64))
    assert with_kernels[1] < with_kernels[0] / 2
