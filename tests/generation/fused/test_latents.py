"""Layers with latents, whose queries and stored parts are one launch in steps: which, how exactly, and when."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import hf_fastdecode as fd
from hf_fastdecode.generation.fused import latents
from hf_fastdecode.generation.fused.latents import LATENTS
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.trial import tried
from hf_fastdecode.kernels.latent_queries.api import Rotation
from hf_fastdecode.kernels.pointwise.api import RotaryForm

from ...patches.test_latent_attention import model_of
from ...tiny_models import ragged_prompts, seeded
from ..calls import as_in_stock
from ..launches import fuse_on_the_cpu
from ..uncaptured import SAMPLING, on_the_cpu
from .half_models import Counted, fail

ROTATIONS = {
    "without-query-ranks": Rotation(RotaryForm.WHOLE, pairs=True, stays=True),
    "wide-values": Rotation(RotaryForm.ROUNDED, pairs=True),
    "scaled-depth": Rotation(RotaryForm.ROUNDED, pairs=False),
    "two-in-a-layer": None,  # it scales queries and latents
}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 1}


@pytest.mark.parametrize("name", ROTATIONS)
def test_which_are_found(name: str) -> None:
    module = next(one for one in model_of(name).modules() if LATENTS.may_be(type(one)))
    form = tried(LATENTS.form_of, module) if LATENTS.key(module) is not None else None
    assert (None if form is None else form.rotation) == ROTATIONS[name]


def test_layers_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(latents.form_of)
    monkeypatch.setattr("hf_fastdecode.generation.fused.modules._KINDS", (LATENTS._replace(form_of=counted),))
    assert len(FusedModules(model_of("without-query-ranks")).modules) == 2
    assert counted.count == 1


def test_other_code_is_left_alone() -> None:
    """A layer whose code hands on something else; and one of whose parts is missing."""
    model = model_of("without-query-ranks")
    module = model.model.layers[0].self_attn

    class Doubled(type(module)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            return super().forward(2 * hidden_states, **kwargs)

    module.__class__ = Doubled
    assert not LATENTS.may_be(Doubled)
    other = model.model.layers[1].self_attn
    other.scaling = 2 * other.scaling
    assert LATENTS.key(other) is not None
    other.kv_a_layernorm = nn.Identity()
    assert LATENTS.key(other) is None


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Counts launches; steps run as on a GPU."""
    fuse_on_the_cpu(monkeypatch)
    launches = Counted(latents.absorb)
    monkeypatch.setattr(latents, "absorb", launches)
    return launches


@on_the_cpu
@pytest.mark.parametrize(
    ("name", "mode"), [("without-query-ranks", "graph"), ("wide-values", "eager"), ("scaled-depth", "graph")]
)
def test_tokens_equal_stock_in_float32(
    name: str, mode: str, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latents, "runs_fused", lambda hidden: True)
    model = model_of(name, **SMALL)
    call = ragged_prompts(20, 17, shared=16) | SAMPLING
    stock = seeded(lambda: model.generate(**call))
    options = {"backend": "triton"} if mode == "graph" else {}
    with fd.enabled(model, mode=mode, min_saved_tokens=1, **options):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        assert fd.explain(model).last_call.mode == mode
    assert counted.count == 3  # of four tokens the first is of the prompts' pass


@on_the_cpu
def test_error_in_half_precision(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of logits, against fp64: at most 1.1 times that of transformers, and the same as by other operators."""
    model = model_of("without-query-ranks", **SMALL).half()
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 5}
    call, found = ragged_prompts(24, 21, shared=16) | SAMPLING | options, []
    for launches in (4, 0):
        with fd.enabled(model, mode="graph", backend="triton", min_saved_tokens=1):
            found.append(seeded(lambda: model.generate(**call)))
        assert counted.count == launches
        monkeypatch.setattr(latents, "runs_fused", lambda hidden: False)
        counted.count = 0
    ours, others = (torch.stack(one.logits[1:], 1).double() for one in found)
    torch.testing.assert_close(ours, others, rtol=0, atol=2e-3)
    mask = torch.cat([call["attention_mask"].repeat_interleave(3, 0), torch.ones(6, 4, dtype=torch.long)], 1)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        exact, stock = (
            one(found[0].sequences[:, :-1], **given).logits[:, 24:].double()
            for one in (copy.deepcopy(model).double(), model)
        )
    assert float((ours - exact).norm()) <= 1.1 * float((stock - exact).norm())


@on_the_cpu
@pytest.mark.parametrize("change", ["bias", "failure"])
def test_layers_keep_their_code(change: str, counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases of keys and values, and a kernel that fails: the same tokens, by other operators."""
    monkeypatch.setattr(latents, "runs_fused", lambda hidden: True)
    model = model_of("without-query-ranks", **SMALL)
    layer = model.model.layers[0].self_attn
    if change == "bias":
        layer.kv_b_proj.bias = nn.Parameter(torch.linspace(-2, 2, layer.kv_b_proj.out_features))
    else:
        monkeypatch.setattr(latents, "absorb", fail)
    call = ragged_prompts(20) | SAMPLING
    as_in_stock(model, lambda: model.generate(**call), "shared", min_saved_tokens=1, mode="eager")
    assert counted.count == 0
