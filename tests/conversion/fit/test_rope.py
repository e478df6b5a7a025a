"""RoPE and its inverse."""

from __future__ import annotations

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_half

from hf_fastdecode.conversion.fit.rope import RopeLayout, Rotation

from .layers import rope

LAYOUTS: tuple[RopeLayout, ...] = ("half", "interleaved")


def keys() -> torch.Tensor:
    return torch.randn(4, 63, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("factor", [1.0, 1.2079], ids=["plain", "yarn"])
@pytest.mark.parametrize("rotary_dim", [2, 6, 12])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unrotation_is_the_inverse(layout: RopeLayout, rotary_dim: int, factor: float) -> None:
    tables, x = rope(63, rotary_dim, factor), keys()
    rotation = Rotation(tables.cos, tables.sin, layout)
    rotated = rotation.rotate(x)
    for back in (rotation.unrotate(rotated), rotation.rotate(rotation.unrotate(x))):
        # Six roundings to each number of a pair: products, sums, the tables' norm and the quotient, forth and back.
        pairs = 12 * torch.finfo(torch.float64).eps * x.norm(dim=-1, keepdim=True)
        assert ((back - x).abs() <= pairs).all()
    assert torch.equal(rotated[..., rotary_dim:], x[..., rotary_dim:])
    norms = rotated[..., :rotary_dim].norm(dim=-1), factor * x[..., :rotary_dim].norm(dim=-1)
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_is_that_of_transformers(layout: RopeLayout) -> None:
    tables, x = rope(63), keys().float()
    cos, sin = (
        torch.cat([table, table], -1).float() if layout == "half" else table.repeat_interleave(2, -1).float()
        for table in (tables.cos, tables.sin)
    )
    theirs = rotate_half if layout == "half" else rotate_interleaved
    expected, _ = theirs(x[None], x[None], cos[None], sin[None])
    assert torch.equal(Rotation.from_repeated(cos, sin, layout).rotate(x), expected[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cached_rotated_keys_come_back_within_their_rounding(layout: RopeLayout, dtype: torch.dtype) -> None:
    """Rotation keeps norms, so un-rotating adds no error to what rounding did to a pair of coordinates."""
    tables, x = rope(63, 12, 1.2079), keys()
    rotation = Rotation(tables.cos, tables.sin, layout)
    rotated = rotation.rotate(x)
    cached = rotated.to(dtype)
    back = rotation.unrotate(cached)
    assert back.dtype == torch.float64
    pair = (
        (lambda y: y.unflatten(-1, (2, 6)).norm(dim=-2))
        if layout == "half"
        else (lambda y: y.unflatten(-1, (6, 2)).norm(dim=-1))
    )
    oracle = pair(cached.double() - rotated) / 1.2079
    assert (pair(back - x) <= oracle + 12 * torch.finfo(torch.float64).eps * pair(x)).all()
    single = Rotation(tables.cos.float(), tables.sin.float(), layout).unrotate(cached)  # as a kernel would
    assert (pair(single.double() - x) <= oracle + 12 * torch.finfo(torch.float32).eps * pair(x)).all()


def test_a_part_of_the_tokens() -> None:
    rotation, x = rope(63), keys()
    assert torch.equal(rotation.tokens(slice(30, None)).rotate(x[:, 30:]), rotation.rotate(x)[:, 30:])


def test_narrow_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="rotates 12 coordinates of a head, got heads of 8"):
        rope(63).rotate(keys()[..., :8])
