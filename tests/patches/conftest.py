"""How kernels run in these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..interpreter import merging_two_at_once


@pytest.fixture(scope="package", autouse=True)
def merging_in_pairs() -> Iterator[None]:
    """Interpreted kernels take less time so."""
    with merging_two_at_once():
        yield
