"""What conversions in these tests leave out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_fastdecode.conversion.checkpoint import convert


@pytest.fixture(scope="module", autouse=True)
def undrawn_conversions() -> Iterator[None]:
    """As `undrawn` does, for the fixtures of a module too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "draw_report", lambda report, path: path.touch())
        yield
