"""What conversions in these tests leave out."""

import pytest

from hf_fastdecode.conversion.checkpoint import convert


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the picture of a conversion empty: drawing it takes longer than converting a tiny model."""
    monkeypatch.setattr(convert, "draw_report", lambda report, path: path.touch())
