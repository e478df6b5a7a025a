"""Random batches: logits, losses, hidden states and gradients of shared passes beside stock's."""

import copy
import os
from dataclasses import replace
from functools import cache, partial
from math import exp, log
from statistics import fmean

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ..cases import exhaustive_but
from ..tiny_models import tiny_model
from .batches import batches
from .comparison import (
    PADDING,
    exact_of,
    faults,
    in_doubles,
    moved,
    outcome,
    relative_error,
    report_of,
    sharing,
    typical_faults,
)

_SMALL = {"hidden_size": 32}
_WINDOW = {**_SMALL, "sliding_window": 9}  # which ends inside the rows
_EMBEDDED = {"n_embd": 32}
FAMILIES = {
    "llama-gqa": _SMALL,
    "qwen3": _SMALL,
    "phi3-window": _WINDOW,
    "gemma2": _WINDOW,
    "gemma3_text": _WINDOW,
    "gpt2": _EMBEDDED,
    "opt": {**_SMALL, "word_embed_proj_dim": 32},  # counts positions from the mask
    "gpt_neox": _SMALL,
    "gpt_oss": _WINDOW,
    "mixtral-window": _WINDOW,
    "qwen2-window": _WINDOW,
    "qwen2_moe": _SMALL,
    "gpt_bigcode": _EMBEDDED,
    "cohere2": _WINDOW,
    "olmo3": _WINDOW,
    "mimo_v2_flash": _WINDOW,
    "gemma4_text": _WINDOW,
}
QUICK = ["llama-gqa", "qwen3", "gemma2", "gemma3_text", "gpt2", "opt", "gpt_oss", "mixtral-window", "phi3-window"]
AT_OFFSETS = {"gpt2", "gpt_bigcode", "phi3-window", "gemma4_text", "mimo_v2_flash"}
"""Families whose rows share only with rows behind as much padding, where no positions are given: with a table of
positions, with frequencies that depend on the length, and with tables that may be of positions."""
EXAMPLES = int(os.environ.get("HF_FASTDECODE_EXAMPLES", "20"))
"""Random batches of a family."""
ON_AVERAGE = 1.2
"""The most that the geometric mean of errors may be, in those of stock."""


@cache
def models_of(name):
    """A model, and the same in float64."""
    model = tiny_model(name, **FAMILIES[name])
    return model, in_doubles(copy.deepcopy(model))


def compare(model, doubles, batch):
    """Outcomes of a shared pass, of stock's and of stock's in float64; and the report."""
    run = partial(outcome, batch=batch)
    stock, oracle = run(model), exact_of(doubles, run)
    with sharing(model):
        return (run(model), stock, oracle), report_of(model)


def check(name, batch):
    """Compare one batch with stock, and the report with the batch; returns errors relative to stock's."""
    model, doubles = models_of(name)
    outcomes, report = compare(model, doubles, batch)
    if faults(*outcomes):
        assert not typical_faults([compare(*models, batch)[0] for models in moved(model)]), report
    # Of the returned cache, positions are those of stock.
    offsets = name in AT_OFFSETS
    tokens, distinct = sum(map(len, batch.rows)), batch.distinct(offsets=offsets)
    if len(batch.rows) == 1 or distinct == tokens:
        assert report.path == "stock", report
        return {}
    assert report.path == "shared", report
    assert (report.rows, report.tokens, report.computed) == (len(batch.rows), tokens, distinct), report
    assert not outcomes[0][PADDING].any()
    return {kind: relative_error(*outcomes, kind) for kind in ("logits", "gradient")}


def compare_kept(model, doubles, batch):
    """Outcomes of passes that keep prefixes, of the first rows, of all, and of all once more; and the last report."""
    batch = replace(batch, gradient=False, hidden=False, labels=False)
    some = (len(batch.rows) + 1) // 2
    first = replace(batch, rows=batch.rows[:some], left=batch.left[:some])
    passes = [partial(outcome, batch=one) for one in (first, batch, batch)]
    stocks = [(run(model), exact_of(doubles, run)) for run in passes]
    with sharing(model, reuse_prefix=True):
        return [(run(model), *stock) for run, stock in zip(passes, stocks, strict=True)], report_of(model)


def check_kept(name, batch):
    """Compare passes that keep prefixes with stock; returns the last report."""
    model, doubles = models_of(name)
    found, report = compare_kept(model, doubles, batch)
    if any(faults(*outcomes) for outcomes in found):
        draws = [compare_kept(*models, batch)[0] for models in moved(model)]
        assert not any(typical_faults(one) for one in zip(*draws, strict=True)), report
    return report


def drawn(name, examples, run):
    """Call `run` with random batches."""

    # With Phase.shrink a failing batch becomes a small one, in minutes.
    @settings(max_examples=examples, derandomize=True, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
    @given(batches(embeds=name != "gemma4_text"))  # it looks ids up in each layer
    def test(batch):
        run(name, batch)

    test()


@pytest.mark.parametrize("name", exhaustive_but(QUICK, FAMILIES))
def test_random_batches(name):
    errors = []
    drawn(name, EXAMPLES, lambda name, batch: errors.append(check(name, batch)))
    for kind in ("logits", "gradient"):
        found = [log(error[kind]) for error in errors if error.get(kind)]
        assert len(found) > EXAMPLES // 4 and exp(fmean(found)) <= ON_AVERAGE, (kind, exp(fmean(found)))


@pytest.mark.parametrize("name", exhaustive_but(["gemma3_text", "gpt2"], FAMILIES))
def test_random_batches_over_kept_prefixes(name):
    kept = []
    drawn(name, EXAMPLES // 2, lambda name, batch: kept.append(check_kept(name, batch)))
    assert any(report.kept for report in kept)
