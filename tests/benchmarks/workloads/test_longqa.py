"""Many questions about one text: the same tokens with and without sharing, and answers counted."""

from __future__ import annotations

import pytest
import torch

from benchmarks.workloads import measure as longqa
from benchmarks.workloads.document import make_document
from benchmarks.workloads.measure import QuestionsBench

from .models import QUICK_GREEDY, reading_model

END = 1


@pytest.fixture(scope="module")
def reading():
    model, tokenizer = reading_model()
    document = make_document(lambda text: len(tokenizer(text).input_ids), 400, shots=1)
    assert 2 <= len(document.facts) < 9
    return model, tokenizer, document


@pytest.fixture
def bench(reading):
    return QuestionsBench(*reading, name="tiny", document_name="made", timing=QUICK_GREEDY)


def test_both_ways_give_the_same_and_sharing_prefills_the_text_once(bench):
    case = bench.case(9)
    ours, stock = bench.measure(case, "shared"), bench.measure(case, "stock")
    assert ours["status"] == stock["status"] == "ok"
    width = max(map(len, bench.prompts))
    assert stock["prefilled_tokens"] == 9 * width
    asked = sum(len(bench.prompts[row % len(bench.prompts)]) - case.prefix_tokens for row in range(9))
    assert case.prefix_tokens < ours["prefilled_tokens"] <= case.prefix_tokens + asked
    assert ours["kv_bytes"] < stock["kv_bytes"] / 4
    assert ours["correct"] == stock["correct"]
    assert case.columns() | {"questions": 9, "facts": len(bench.document.facts)} == case.columns()


def test_one_question_shares_nothing_and_is_still_timed(bench):
    row = bench.measure(bench.case(1), "shared")
    assert row["status"] == "ok"
    assert row["ran"].startswith("stock: sharing would save 0 tokens")
    assert row["kv_bytes"] > 0


def test_right_answers_are_counted_row_by_row(bench, monkeypatch):
    answers = [f" {fact.answer}" for fact in bench.document.facts]
    count = len(answers)
    answers[1] = " nonsense"
    monkeypatch.setattr(bench.model.generation_config, "eos_token_id", END)

    def answered(model, batch, enable, timing, **options):
        texts = [answers[row % count] for row in range(len(batch["input_ids"]))]
        ids = bench.tokenizer(texts).input_ids
        width = max(map(len, ids)) + 1
        # Behind the end the model goes on, as rows do that none may leave.
        return {"tokens": torch.tensor([own + [END] + [9] * (width - 1 - len(own)) for own in ids])}

    monkeypatch.setattr(longqa, "measure_calls", answered)
    assert bench.measure(bench.case(count), "shared") == {"status": "ok", "correct": count - 1}
    assert bench.measure(bench.case(2 * count), "stock")["correct"] == 2 * (count - 1)


def test_ways_that_disagree_are_told(bench, monkeypatch):
    monkeypatch.setattr(
        longqa,
        "measure_calls",
        lambda model, batch, enable, timing, **options: {
            "tokens": torch.full((len(batch["input_ids"]), 2), 7 if enable is None else 8)
        },
    )
    assert bench.measure(bench.case(2), "shared")["status"] == "ok"
    assert bench.measure(bench.case(2), "stock") == {"status": "wrong: shared and stock give other tokens"}
    assert bench.measure(bench.case(3), "stock")["status"] == "ok"  # another case, of which nothing is known
