"""Passes over rows that begin alike, and what they are checked for: shared as near to float64 as stock, or stock."""

from __future__ import annotations

import torch

from ..tiny_models import ragged_prompts
from .comparison import compared, gradients, projection, report_of, sharing

LENGTHS, SHARED = (50, 50, 44), 40
ROWS = ragged_prompts(*LENGTHS, shared=SHARED)
CALL = ROWS | {"use_cache": False}
REAL = ROWS["attention_mask"].bool()
WITHOUT_PADDING = {"input_ids": ragged_prompts(50, 50, 50, shared=40)["input_ids"]}
DISTINCT = 40 + 10 + 10 + 4
WITH_OTHER_POSITIONS = 40 + 10 + 10 + 44  # the last row is padded, so that its tokens have other positions


def outputs(model, inputs=CALL, **arguments):
    """Logits of real tokens, and gradients if any parameter needs one."""
    logits = model(**inputs, **arguments).logits[REAL]
    found = {"logits": logits.detach()}
    return found | (gradients(model, projection({"logits": logits})) if logits.requires_grad else {})


def check_shared(model, run=outputs, distinct=DISTINCT):
    """The pass is shared, and as near to float64 as stock's."""
    found, report = compared(model, run)
    assert (report.path, report.computed, found) == ("shared", distinct, []), report


def check_stock(model, reason, run=outputs):
    """The pass is stock's to the bit, and the report says why; other passes are shared before and after."""
    stock = seeded(run, model)
    with sharing(model):
        ours = seeded(run, model)
        report = report_of(model)
    assert report.path == "stock"
    assert reason in report.reason, report
    assert stock.keys() == ours.keys()
    assert all(torch.equal(ours[name], stock[name]) for name in stock)


def seeded(run, model):
    torch.manual_seed(0)
    return run(model)
