"""The table of predicted tokens of docs/slim-measurements.md is what the package measures."""

from __future__ import annotations

import pytest

from tools.slim_tokens import PAGE, caches

from ...cli.command_line import needs_weights
from .page_tables import check_tokens

pytestmark = pytest.mark.exhaustive

SOME = ["keys + d/32 V-coordinates, int8"]
"""One, as each takes minutes on a busy machine."""


@needs_weights
@pytest.mark.timeout(900)
def test_the_page_shows_the_tokens_that_are_predicted() -> None:
    check_tokens(PAGE, "tools.slim_tokens", caches(), SOME)
