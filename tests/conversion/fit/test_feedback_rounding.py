"""Rounding with feedback."""

from __future__ import annotations

import pytest
import torch

from hf_fastdecode.conversion.fit import round_with_feedback, rounding_feedback

from .layers import relative, spectrum, text


def test_feedback_is_the_best_answer_to_an_error() -> None:
    """The row that is rounded last makes up for the other as least squares would, without a grid of its own."""
    gram = torch.tensor([[4.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    target = torch.tensor([[0.3], [0.4]], dtype=torch.float64)
    rounded = round_with_feedback(
        target, rounding_feedback(gram), lambda rows, at: torch.where((at == 0)[:, None], rows.round(), rows)
    )
    assert rounded[0] == 0
    assert rounded[1].item() == pytest.approx(0.4 + 0.3 * 1.0 / 1.0)  # gram[1, 0] / gram[1, 1]


def test_products_change_less_than_with_rounding_to_nearest() -> None:
    """Of more rows than are corrected at once."""
    mix = spectrum(300, 300, 1e3, torch.Generator().manual_seed(0))
    feedback, rows = rounding_feedback(mix.mT @ mix), text(300)
    rounded = round_with_feedback(rows, feedback, lambda part, _: part.half().double())
    error, error_of_nearest = (relative(mix @ one, mix @ rows) for one in (rounded, rows.half().double()))
    assert error < error_of_nearest / 2
    assert torch.equal(rounded[feedback.order[0]], rows.half().double()[feedback.order[0]])
