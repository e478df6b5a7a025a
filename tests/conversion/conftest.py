"""Overrides for conversions in these tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def undrawn_conversions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw no reports, in the fixtures of a module too; tests of the mathematics need no conversions."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "fit":
            patch.setattr("hf_fastdecode.conversion.convert.draw_report", lambda report, path: path.touch())
        yield
