"""Norms of heads that wait for the rotation behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_fastdecode.generation.fused import head_norms, norms
from hf_fastdecode.generation.fused.head_norms import WaitingHeadNorms, waiting_head_norms
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.norms import WaitingSums
from hf_fastdecode.generation.steps.graph_capture import FusedProjections
from hf_fastdecode.kernels.pointwise.api import NormForm, RotaryForm

from ...tiny_models import ONE_OF_EACH_TYPE, tiny_model_of_type
from .half_models import DEVICE, check_fused, counting, fail, half, logits


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


@pytest.mark.parametrize(("name", "kept"), [("qwen3", 5), ("gemma3_text", 9), ("olmo3", 9), ("llama-gqa", 5)])
def test_taken_along(name: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All norms of heads; others, also those of all heads together, keep their launch."""
    model = half(name)
    rotations, alone = counting(monkeypatch, head_norms, "rotate"), counting(monkeypatch, head_norms, "rms_norm")
    others = counting(monkeypatch, norms, "rms_norm")
    layers = model.config.num_hidden_layers
    with FusedModules(model).installed(), WaitingHeadNorms():
        logits(model)
    assert (rotations.count, alone.count) == (layers if name in ("qwen3", "gemma3_text") else 0, 0)
    assert others.count == kept


@pytest.mark.parametrize("name", ONE_OF_EACH_TYPE)
def test_same_logits(name: str) -> None:
    model = half(name)
    with FusedModules(model).installed():
        expected = logits(model)
        with torch.no_grad(), FusedProjections(model), WaitingHeadNorms(), WaitingSums():
            assert torch.equal(logits(model), expected)


SMALL: dict[str, Any] = {
    **{"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"num_hidden_layers": 2, "intermediate_size": 64},
}


@pytest.mark.parametrize(
    ("name", "settings", "rotations"),
    [
        ("exaone4", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}, 1),
        ("apertus", {}, 2),
        ("hunyuan_v1_dense", {}, 0),
        ("glm4_moe", {"use_qk_norm": True, "partial_rotary_factor": 0.5, "first_k_dense_replace": 2}, 2),
    ],
)
def test_other_places(name: str, settings: dict[str, Any], rotations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that are not rotated in each layer, that are rotated before, or in part."""
    model = tiny_model_of_type(name, **SMALL, **settings).half().to(DEVICE)
    with FusedModules(model).installed():
        expected = logits(model)
        counted = counting(monkeypatch, head_norms, "rotate")
        with torch.no_grad(), WaitingHeadNorms():
            assert torch.equal(logits(model), expected)
    assert counted.count == rotations


def test_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms have launches of their own, and PyTorch's operators where those fail, too."""
    model = half("qwen3")
    with FusedModules(model).installed():
        expected = logits(model)
        monkeypatch.setattr(head_norms, "rotate", fail)
        with WaitingHeadNorms():
            assert torch.equal(logits(model), expected)
    monkeypatch.setattr(head_norms, "rms_norm", fail)
    check_fused(model, WaitingHeadNorms())


def test_read_after_the_rotation() -> None:
    """Code that goes on with normalized heads finds them."""
    queries, keys, weight = random(1, 2, 1, 4, 32), random(2, 2, 1, 2, 32), random(3, 32)
    cos = sin = random(4, 1, 1, 32)
    with torch.no_grad(), WaitingHeadNorms() as waiting:
        both = [waiting.wait(one, weight, 1e-5, NormForm.WHOLE) for one in (queries, keys)]
        heads = [one.transpose(1, 2) for one in both]
        assert waiting.rotate(*heads, cos, sin, RotaryForm.ROUNDED, halves=False) is not None
        found = [one.clone() for one in both]
    for one, x in zip(found, (queries, keys), strict=True):
        assert torch.equal(one, head_norms.rms_norm(x, weight, 1e-5, NormForm.WHOLE))


def test_norms_that_differ() -> None:
    """Of other epsilons or forms, of one part alone, or of heads divided in another way."""
    x, keys, weight = random(1, 2, 1, 4, 32), random(2, 2, 1, 2, 32), random(3, 32)
    cos = sin = random(4, 1, 1, 16)
    for eps, form, width in ((1e-5, NormForm.WHOLE, 32), (1e-6, NormForm.ROUNDED, 32), (1e-5, NormForm.ROUNDED, 16)):
        with torch.no_grad(), WaitingHeadNorms() as waiting:
            queries = waiting.wait(x, weight, 1e-5, NormForm.ROUNDED).view(2, 1, -1, width).transpose(1, 2)
            others = waiting.wait(keys, weight, eps, form).view(2, 1, -1, width).transpose(1, 2)
            given = cos, sin, RotaryForm.ROUNDED
            assert waiting.rotate(queries, others, *given, halves=False) is None
            assert waiting.rotate(queries, random(5, 2, 2, 1, width), *given, halves=False) is None
        expected = head_norms.rms_norm(x, weight, 1e-5, NormForm.ROUNDED)
        assert torch.equal(queries, expected.view(2, 1, -1, width).transpose(1, 2))


USES: dict[str, Callable[[Tensor], Any]] = {
    "a function": lambda heads: heads * 1,
    "a view": lambda heads: heads.transpose(1, 2).flatten(2).view(2, 3, 4, 32).transpose(1, 2),
    "a part": lambda heads: torch.cat([heads[:, :1], heads[:, 1:]], 1),
    "a list": lambda heads: torch.stack([heads.view(-1), heads.view(-1)])[1].view(heads.shape),
    "a keyword": lambda heads: torch.add(input=heads, other=torch.zeros_like(heads)),
    "in place": lambda heads: heads.mul_(1),
    "memory": lambda heads: heads if heads.data_ptr() else None,
    "nothing": lambda heads: heads,
}


@pytest.mark.parametrize("use", USES)
def test_every_other_operation_sees_the_norm(use: str) -> None:
    x, weight = random(1, 2, 4, 3, 32), random(2, 32)
    expected = head_norms.rms_norm(x, weight, 1e-5, NormForm.ROUNDED)
    with torch.no_grad(), WaitingHeadNorms() as waiting:
        heads = waiting.wait(x, weight, 1e-5, NormForm.ROUNDED)
        assert heads.shape == x.shape
        found = USES[use](heads)
    assert torch.equal(found, expected)


def test_changed_input() -> None:
    """Heads that are changed in place afterwards, by another view of their memory, count with what they were."""
    both, weight = random(1, 2, 3, 8, 32), random(2, 32)
    x = both.view(6, 1, 8, 32)
    expected = head_norms.rms_norm(x, weight, 1e-5, NormForm.ROUNDED)
    with torch.no_grad(), WaitingHeadNorms() as waiting:
        heads = waiting.wait(x, weight, 1e-5, NormForm.ROUNDED)
        both[0].zero_()
    assert torch.equal(heads, expected)


def test_error_within() -> None:
    """The norm is computed, and later ones do not wait."""
    x, weight, found = random(1, 2, 4, 3, 32), random(2, 32), list[Tensor]()

    def raising() -> None:
        with torch.no_grad(), WaitingHeadNorms() as waiting:
            found.append(waiting.wait(x, weight, 1e-5, NormForm.ROUNDED))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raising()
    assert torch.equal(found[0], head_norms.rms_norm(x, weight, 1e-5, NormForm.ROUNDED))
    assert waiting_head_norms() is None
