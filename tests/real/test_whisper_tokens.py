"""The table of predicted tokens of docs/slim-measurements.md is what the package measures."""

from __future__ import annotations

import pytest

from tools.whisper_tokens import PAGE, caches

from ..conversion.page_tables import check_tokens

SOME = ["keys and values, bf16", "`x` in int8, `e` in bf16"]
"""Few, as each takes minutes on a busy machine."""


@pytest.mark.timeout(900)
def test_the_page_shows_the_tokens_that_are_predicted() -> None:
    check_tokens(PAGE, "tools.whisper_tokens", caches(), SOME)
