"""RMSNorm, rotary embedding and gated activation, against PyTorch's operators with the same roundings."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_fastdecode.kernels.failures import KernelFailedError
from hf_fastdecode.kernels.pointwise import api, gradients, reference
from hf_fastdecode.kernels.pointwise.api import Activation, GatedNormForm, HeadNorms, NormForm, RotaryForm
from hf_fastdecode.kernels.pointwise.gradients import Operator, gated, rms_norm, rotate

from .operator_runs import DEVICE, DTYPES, random


def assert_alike(name: str, given: Sequence[Tensor], *how: object, **named: object) -> Any:
    """Error at most twice that of PyTorch's operators and a rounding; at most one in a hundred halves differs.

    Numbers under 0.01, where gates are all but shut, are differences of nearly equal ones and may differ more often.
    """
    found = getattr(api, name)(*given, *how, **named)
    expected = getattr(reference, name)(*given, *how, **named)
    exact = getattr(reference, name)(*(one.double() for one in given), *how, **named)
    for one, two, three in zip(
        *(part if isinstance(part, tuple) else [part] for part in (found, expected, exact)), strict=True
    ):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        assert (one - three).abs().max() <= 2 * (two - three).abs().max() + torch.finfo(
            one.dtype
        ).eps * three.abs().max()
        if one.dtype != torch.float32:
            assert (one != two)[two.abs() > 0.01].float().mean() <= 0.01
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", NormForm)
@pytest.mark.parametrize("shape", [(1, 1, 4096), (3, 5, 1000), (2, 7, 3, 80), (1, 64), (2, 1, 9000)])
def test_rms_norm(shape: tuple[int, ...], form: NormForm, dtype: torch.dtype) -> None:
    x, weight = random(*shape, seed=1, dtype=dtype), random(shape[-1], seed=2, dtype=dtype)
    assert_alike("rms_norm", (x, weight), 1e-5, form)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", NormForm)
@pytest.mark.parametrize("shape", [(3, 5, 1000), (2, 7, 3, 80)])
def test_rms_norm_of_a_sum(shape: tuple[int, ...], form: NormForm, dtype: torch.dtype) -> None:
    """The sum is that of PyTorch, to the bit, and the norm that of the rounded sum."""
    x, addend, weight = (random(*size, seed=len(size), dtype=dtype) for size in (shape, shape, shape[-1:]))
    plus = api.Plus(addend, torch.empty_like(x))
    found = api.rms_norm(x, weight, 1e-5, form, plus)
    assert torch.equal(plus.total, x + addend)
    assert torch.equal(found, api.rms_norm(x + addend, weight, 1e-5, form))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", GatedNormForm)
@pytest.mark.parametrize(("shape", "group"), [((3, 5, 128), None), ((7, 1, 3000), 1000), ((2, 96), 24)])
def test_gated_rms_norm(shape: tuple[int, ...], group: int | None, form: GatedNormForm, dtype: torch.dtype) -> None:
    """The gate is a part of a product's rows."""
    x, weight = random(*shape, seed=1, dtype=dtype), random(shape[-1], seed=2, dtype=dtype)
    gate = 2 * random(*shape[:-1], 2 * shape[-1], seed=3, dtype=dtype)[..., shape[-1] :]
    assert_alike("gated_rms_norm", (x, gate, weight), 1e-5, form, group=group)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", RotaryForm)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("heads", "width", "rotary"), [((4, 4), 64, 64), ((12, 3), 80, 80), ((9, 1), 64, 16)])
@pytest.mark.parametrize(("batch", "length", "of_angles"), [(3, 1, 3), (1, 9, 1), (2, 5, 1)])
def test_rotate(
    batch: int,
    length: int,
    of_angles: int,
    heads: tuple[int, int],
    width: int,
    rotary: int,
    halves: bool,
    form: RotaryForm,
    dtype: torch.dtype,
) -> None:
    queries, keys = (random(batch, length, count, width, seed=count, dtype=dtype).transpose(1, 2) for count in heads)
    angles = 10 * random(of_angles, length, rotary // 2 if halves else rotary, seed=7, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found = assert_alike("rotate", (queries, keys, cos, sin), form, halves=halves)
    assert [part.stride() for part in found] == [queries.stride(), keys.stride()]


def test_rotate_of_views_with_gaps() -> None:
    """Queries and keys are parts of one product."""
    both = random(2, 3, 4 * 3, 16, seed=1, dtype=torch.float16)
    queries, keys = both[:, :, :8].transpose(1, 2), both[:, :, 8:].transpose(1, 2)
    angles = random(1, 3, 16, seed=7, dtype=torch.float32)
    cos, sin = angles.cos().half(), angles.sin().half()
    assert_alike("rotate", (queries, keys, cos, sin), RotaryForm.ROUNDED)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NormForm)
@pytest.mark.parametrize("form", RotaryForm)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("heads", "width", "rotary"), [((32, 4), 128, 128), ((12, 3), 80, 32), ((5, 1), 256, 64)])
def test_rotate_with_norms(
    heads: tuple[int, int],
    width: int,
    rotary: int,
    halves: bool,
    form: RotaryForm,
    norm: NormForm,
    dtype: torch.dtype,
) -> None:
    """To the bit what norms and a rotation compute in launches of their own; normalized heads are written."""
    both = [random(2, 3, count, width, seed=count, dtype=dtype).transpose(1, 2) for count in heads]
    angles = 10 * random(1, 3, rotary // 2 if halves else rotary, seed=7, dtype=torch.float32)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = [random(width, seed=seed, dtype=dtype) for seed in (8, 9)]
    norms = HeadNorms(*weights, 1e-5, norm, *(torch.full_like(one, torch.nan) for one in both))
    found = assert_alike("rotate", (*both, cos, sin), form, halves=halves, norms=norms)
    expected = [
        api.rms_norm(one.transpose(1, 2), weight, 1e-5, norm).transpose(1, 2)
        for one, weight in zip(both, weights, strict=True)
    ]
    assert all(map(torch.equal, norms[4:], expected))
    assert all(map(torch.equal, found, api.rotate(*expected, cos, sin, form, halves=halves)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("shape", [(1, 1, 1100), (3, 5, 64), (2, 1024)])
def test_gated(shape: tuple[int, ...], activation: Activation, dtype: torch.dtype) -> None:
    both = 3 * random(*shape[:-1], 2 * shape[-1], seed=1, dtype=dtype)
    for gate, up in (both.chunk(2, dim=-1), [half.contiguous() for half in both.chunk(2, dim=-1)]):
        assert_alike("gated", (gate, up), activation)


def test_gated_of_large_numbers() -> None:
    """Where an exponential overflows, the gate is shut or open."""
    gate = torch.tensor([-1e4, -200.0, -90.0, 0.0, 90.0, 1e4], device=DEVICE)
    up = torch.full_like(gate, 2.0)
    for activation in Activation:
        torch.testing.assert_close(api.gated(gate, up, activation), reference.gated(gate, up, activation))


def test_refused() -> None:
    x = random(2, 8, seed=1, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"contiguous x .* got \(8, 2\)"):
        api.rms_norm(x.mT, x[:, 0], 1e-5, NormForm.WHOLE)
    with pytest.raises(ValueError, match=r"contiguous x .* got \(2, 8\)"):
        api.rms_norm(x, x[0], 1e-5, NormForm.WHOLE, api.Plus(x[:1], x))
    with pytest.raises(ValueError, match="up to 16384 columns"):
        api.rms_norm(x.new_ones(16385), x.new_ones(16385), 1e-5, NormForm.WHOLE)
    with pytest.raises(ValueError, match="equal shapes and dtypes"):
        api.gated(x, x[:, :4], Activation.SILU)
    heads = random(2, 4, 3, 8, seed=1, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"rotate takes .* \(2, 3, 10\)"):
        api.rotate(heads, heads, heads.new_ones(2, 3, 10), heads.new_ones(2, 3, 10), RotaryForm.WHOLE)
    cos, weight = heads.new_ones(2, 3, 8), heads.new_ones(8)
    norms = HeadNorms(weight, weight, 1e-5, NormForm.ROUNDED, heads, heads)
    others = [norms._replace(key_weight=weight[:4]), norms._replace(query_weight=weight.half())]
    for other in (*others, norms._replace(keys=heads[:1]), norms._replace(queries=heads.mT.contiguous().mT)):
        with pytest.raises(ValueError, match="rotate with norms takes"):
            api.rotate(heads, heads, cos, cos, RotaryForm.WHOLE, norms=other)
    with pytest.raises(ValueError, match="no gradients"):
        api.rotate(heads, heads, cos, cos, RotaryForm.WHOLE, backward=True, norms=norms)


def assert_gradients(operator: Operator, given: Sequence[Tensor], needed: Sequence[bool], **how: Any) -> None:
    """As `assert_alike`, of the inputs that need one; gradients of results are expanded, or strided."""
    grads: list[list[Tensor]] = []
    for run, wide in ((operator, False), (operator.reference, False), (operator.reference, True)):
        inputs = [one.double() if wide else one.detach() for one in given]
        asked = [one.requires_grad_() for one, needs in zip(inputs, needed, strict=True) if needs]
        found = run(*inputs, **how)
        parts = [one for one in (found if isinstance(found, tuple) else (found,)) if one.requires_grad]
        ones = [part.new_ones(1).expand(part.shape) for part in parts]
        strided = [random(*part.mT.shape, seed=part.shape[1], dtype=given[0].dtype).mT.to(part) for part in parts]
        both = (torch.autograd.grad(parts, asked, of_parts, retain_graph=True) for of_parts in (ones, strided))
        grads.append([one for own in both for one in own])
    for one, two, three in zip(*grads, strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        rounding = torch.finfo(one.dtype).eps * three.abs().max()
        assert (one - three).abs().max() <= 2 * (two - three).abs().max() + rounding


@pytest.fixture
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients of the reference, which would hide that a kernel fails."""
    monkeypatch.delattr(gradients, "_of_reference")


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", NormForm)
@pytest.mark.parametrize("shape", [(1, 1, 4096), (3, 5, 1000), (37, 5, 3, 80), (2, 1, 9000)])
def test_gradients_of_rms_norm(shape: tuple[int, ...], form: NormForm, dtype: torch.dtype) -> None:
    """Of few rows, and of more than programs take at once."""
    given = random(*shape, seed=1, dtype=dtype), random(shape[-1], seed=2, dtype=dtype)
    for needed in ((True, True), (True, False), (False, True)):
        assert_gradients(rms_norm, given, needed, eps=1e-5, form=form)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", RotaryForm)
@pytest.mark.parametrize(
    ("heads", "width", "rotary", "halves"), [((4, 4), 64, 64, False), ((12, 3), 80, 80, True), ((9, 1), 64, 16, True)]
)
def test_gradients_of_rotate(
    heads: tuple[int, int], width: int, rotary: int, halves: bool, form: RotaryForm, dtype: torch.dtype
) -> None:
    """Also where halves have other cosines and sines; queries and keys are not kept."""
    queries, keys = (random(2, 5, count, width, seed=count, dtype=dtype).transpose(1, 2) for count in heads)
    angles = 10 * random(1, 5, rotary // 2 if halves else rotary, seed=7, dtype=torch.float32)
    given = queries, keys, angles.cos().to(dtype), angles.sin().to(dtype)
    for needed in ((True, True, False, False), (False, True, False, False)):
        assert_gradients(rotate, given, needed, form=form, halves=halves)
    found, _ = rotate(queries.requires_grad_(), *given[1:], form=form, halves=halves)
    assert len(found.grad_fn.saved_tensors) == 2


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("shape", [(1, 1, 1100), (3, 5, 64), (2, 1, 1024)])
def test_gradients_of_gated(shape: tuple[int, ...], activation: Activation, dtype: torch.dtype) -> None:
    """Also where an exponential overflows."""
    both = 3 * random(*shape[:-1], 2 * shape[-1], seed=1, dtype=dtype)
    both[..., :2] = torch.tensor([-1e4, 1e4])
    for given in (both.chunk(2, dim=-1), [half.contiguous() for half in both.chunk(2, dim=-1)]):
        assert_gradients(gated, given, (True, True), activation=activation)


def _fails(*given: Any, **how: Any) -> Any:
    raise KernelFailedError("on purpose")


@pytest.mark.parametrize("operator", [rms_norm, rotate, gated])
def test_gradients_where_the_kernel_fails(operator: Operator) -> None:
    """Those of the reference; also in cosines and sines, which the kernel does not compute."""
    x, other = (random(2, 4, 3, 64, seed=seed, dtype=torch.float16) for seed in (1, 2))
    cos, sin = (random(2, 3, 64, seed=seed, dtype=torch.float16) for seed in (3, 4))
    how: dict[Operator, dict[str, Any]] = {
        rms_norm: {"eps": 1e-5, "form": NormForm.ROUNDED},
        rotate: {"form": RotaryForm.ROUNDED},
        gated: {"activation": Activation.SILU},
    }
    given = {rms_norm: [x, other[0, 0, 0]], rotate: [x, other, cos, sin], gated: [x, other]}[operator]
    for needed in ((True, True, False, False), (True,) * 4):
        assert_gradients(operator._replace(backward=_fails), given, needed[: len(given)], **how[operator])
    assert_gradients(operator, given, needed[: len(given)], **how[operator])
    with torch.no_grad():
        found = operator(*(one.requires_grad_() for one in given), **how[operator])
    assert not any(part.requires_grad for part in (found if isinstance(found, tuple) else (found,)))
