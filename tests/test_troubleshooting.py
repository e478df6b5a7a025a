"""docs/troubleshooting.md has every reason of the source, and quotes nothing that the source does not say."""

import re

from tools import reasons

PAGE = reasons.PAGE.read_text()


def test_the_page_has_the_reasons_of_the_source():
    assert reasons.refreshed(PAGE) == PAGE, "run python -m tools.reasons"


def test_every_reason_has_a_subject():
    lost = {reason.file for reason in reasons.reasons() if reasons.subject_of(reason) is None}
    assert lost <= {"generation/call_context.py"}, "name these files in SUBJECTS of tools/reasons.py"
    assert len(reasons.reasons()) > 100


def test_texts_are_quoted_as_the_source_has_them():
    by_hand = PAGE.partition("## All reasons")[0]
    quoted = re.findall(r"^\| `([^`]+)` \|", by_hand, re.MULTILINE)
    assert len(quoted) > 10
    source = " \n".join(reasons.templates()).replace("%d", "…")
    for text in quoted:
        for piece in text.split("…"):
            assert piece.strip() in source, text


def test_reasons_are_read_with_their_values_left_out():
    texts = {reason.text: reason.remedy for reason in reasons.reasons()}
    assert texts["attention dropout is …, and decoding needs 0"] == "call model.eval()"
    assert "use_cache=False" in texts
