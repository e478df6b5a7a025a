"""lm-eval, evalplus and pipelines, unmodified: an enabled model gives stock's samples and prefills fewer tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import hf_fastdecode as fd
from hf_fastdecode.assets import MODEL_PATH, embedded_tasks

from .evaluation import evalplus_decoder, evalplus_samples, lm_eval_samples, pipeline_samples
from .models import load
from .recording import Calls, recorded

TASKS = embedded_tasks()[:3]


@pytest.fixture(scope="module")
def embedded():
    return load("embedded")


def stock_and_enabled(model, run: Callable[[], list[list[str]]], **options) -> tuple[Calls, Calls]:
    """The calls of a program with stock transformers and with the model enabled, after their samples were compared."""
    with recorded(model) as stock:
        expected = run()
    with fd.enabled(model, **options), recorded(model) as enabled:
        found = run()
    assert found == expected
    assert len({sample for samples in expected for sample in samples}) > 1
    assert [(call.rows, call.padded_length) for call in enabled.made] == [
        (call.rows, call.padded_length) for call in stock.made
    ]
    return stock, enabled


@pytest.mark.parametrize(
    ("batch_size", "repeats", "wrapper"),
    [
        pytest.param(4, 4, {}, id="repeats"),
        pytest.param(5, 4, {}, id="batches-across-problems"),
        pytest.param(3, 1, {}, id="greedy"),
        # Greedy: a draw that rounding changes would shift all later ones.
        pytest.param(3, 1, {"mixed_precision_dtype": "bfloat16"}, id="autocast"),
    ],
)
def test_lm_eval(embedded, batch_size, repeats, wrapper, tmp_path):
    model, tokenizer = embedded
    stock, enabled = stock_and_enabled(
        model,
        lambda: lm_eval_samples(
            *(model, tokenizer, TASKS, tmp_path),
            **{"shots": 1, "batch_size": batch_size, "new_tokens": 24, "repeats": repeats, **wrapper},
        ),
    )
    assert enabled.paths == {"shared"}, enabled.made
    assert enabled.prefilled_tokens < stock.prefilled_tokens / 2


def test_lm_eval_ends_samples_at_strings_of_several_tokens(embedded, tmp_path):
    model, tokenizer = embedded
    options = {"shots": 1, "batch_size": 4, "new_tokens": 24, "repeats": 4}
    whole = lm_eval_samples(model, tokenizer, TASKS, tmp_path, **options)
    _, enabled = stock_and_enabled(
        model, lambda: lm_eval_samples(model, tokenizer, TASKS, tmp_path, until=("\n    return",), **options)
    )
    assert enabled.paths == {"shared"}
    with fd.enabled(model):
        cut = lm_eval_samples(model, tokenizer, TASKS, tmp_path, until=("\n    return",), **options)
    assert any("\n    return" in sample for samples in whole for sample in samples)
    assert not any("\n    return" in sample for samples in cut for sample in samples)


def test_lm_eval_one_prompt_at_a_time_prefills_the_examples_once(embedded, tmp_path):
    model, tokenizer = embedded
    stock, enabled = stock_and_enabled(
        model,
        lambda: lm_eval_samples(model, tokenizer, TASKS, tmp_path, shots=2, batch_size=1, new_tokens=24),
        reuse_prefix=True,
    )
    later = enabled.made[1:]
    assert len(later) == 2
    for call in later:
        assert call.path == "shared", call.reason
        assert call.prefilled_tokens < call.padded_length / 2
    assert stock.prefilled_tokens == sum(call.padded_length for call in enabled.made)


def test_evalplus_over_three_problems():
    decoder = evalplus_decoder(MODEL_PATH, samples=5, new_tokens=24)
    previous = vars(decoder.model).get("_get_stopping_criteria")

    def run():
        # evalplus adds its criterion to the model anew in every call, and never takes one off.
        if previous is None:
            vars(decoder.model).pop("_get_stopping_criteria", None)
        return evalplus_samples(decoder, TASKS, shots=1, samples=5)

    stock, enabled = stock_and_enabled(decoder.model, run)
    assert enabled.paths == {"shared"}, enabled.made
    assert [call.prefilled_tokens for call in enabled.made] == [call.padded_length for call in stock.made]


@pytest.mark.parametrize(("samples", "batch_size"), [(5, 1), (3, 2)])
def test_pipeline(embedded, samples, batch_size):
    model, tokenizer = embedded
    stock, enabled = stock_and_enabled(
        model,
        lambda: pipeline_samples(
            *(model, tokenizer, TASKS), shots=1, samples=samples, new_tokens=24, batch_size=batch_size
        ),
    )
    assert enabled.paths == {"shared"}, enabled.made
    assert enabled.prefilled_tokens < stock.prefilled_tokens / 2


def test_lm_eval_with_smollm2(tmp_path):
    model, tokenizer = load("smollm2")
    stock, enabled = stock_and_enabled(
        model,
        lambda: lm_eval_samples(
            model, tokenizer, TASKS[:1], tmp_path, shots=1, batch_size=4, new_tokens=12, repeats=4
        ),
    )
    assert enabled.paths == {"shared"}, enabled.made
    assert enabled.prefilled_tokens * 4 == stock.prefilled_tokens
