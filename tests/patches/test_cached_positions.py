"""Positions of cached tokens, counted from masks of every form."""

from __future__ import annotations

import pytest
import torch

from hf_fastdecode.patches.layers.rotation import key_positions, require_counted, visible_slots

MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 1, 1]])
POSITIONS = (MASK.cumsum(-1) - 1).masked_fill(MASK == 0, 0)  # as generate makes them


@pytest.mark.parametrize("cached", [0, 3, 5, torch.tensor(4)])
@pytest.mark.parametrize("shift", [0, 100])
@pytest.mark.parametrize("slots", [6, 9])
def test_left_padding_and_holes(cached: int | torch.Tensor, shift: int, slots: int) -> None:
    """Tokens of this pass have the positions given, cached ones those before, whatever the first number is."""
    given = POSITIONS[:, int(cached) :] + shift
    found = key_positions(given, visible_slots(MASK), cached, slots)
    assert found.shape == (3, slots)
    assert torch.equal(found[:, :6][MASK == 1], (POSITIONS + shift)[MASK == 1])
    assert torch.equal(found[:, int(cached) : 6], given)


def test_without_a_mask_slots_are_positions() -> None:
    found = key_positions(torch.tensor([[7, 8]]), None, 4, 8)
    assert found[0, :6].tolist() == [3, 4, 5, 6, 7, 8]


def test_masks_of_four_dimensions() -> None:
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    boolean = (MASK[:, None, None, :] == 1) & causal
    added = torch.where(boolean, 0.0, torch.finfo(torch.float32).min)
    for mask in (boolean, added):
        assert torch.equal(visible_slots(mask), MASK == 1)
        assert torch.equal(visible_slots({"full_attention": mask}), MASK == 1)
    window = boolean & ~causal.tril(-4)  # of 4 tokens: the last one sees 4 of 6 slots
    assert torch.equal(visible_slots(window), MASK == 1)
    assert visible_slots(None) is None
    assert torch.equal(visible_slots(MASK, 2), MASK[:, 2:] == 1)
    with pytest.raises(ValueError, match="of 2 or 4 dimensions, got 3"):
        visible_slots(boolean[:, 0])


def test_rows_of_padding_alone_are_harmless() -> None:
    found = key_positions(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 4, dtype=torch.bool), 2, 4)
    assert found.shape == (1, 4)


def test_positions_that_skip() -> None:
    require_counted(POSITIONS[:2], MASK[:2] == 1)
    require_counted(POSITIONS[:, 3:], None)
    with pytest.raises(ValueError, match="must rise by 1"):
        require_counted(torch.tensor([[0, 1, 0, 1]]), None)
