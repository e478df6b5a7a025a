"""Models compiled by the caller."""

import logging

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..cases import exhaustive_but
from ..tiny_models import seeded, tiny_model
from .calls import PROMPT, SAMPLING

IN_PLACE = [("compile", False), ("enable", True), ("compile", True), ("enable", False)]
"""What is called first, and whether the compiled model may have no part that runs uncompiled."""


@pytest.fixture
def model():
    torch._dynamo.reset()
    return tiny_model("llama-gqa")


@pytest.fixture
def frames():
    """Number of graphs that dynamo has compiled."""
    torch._dynamo.utils.counters.clear()
    return lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("first", "fullgraph"), exhaustive_but(IN_PLACE[:2], IN_PLACE))
def test_compiled_in_place(model, frames, first, fullgraph, caplog):
    """Shared passes run uncompiled as a whole; all others are compiled as in stock."""
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    logits = model(**PROMPT).logits
    for step in (first, "enable" if first == "compile" else "compile"):
        if step == "compile":
            model.compile(backend="eager", fullgraph=fullgraph)
        else:
            fd.enable(model)
    with caplog.at_level(logging.WARNING, logger="hf_fastdecode"):
        for _ in range(2):
            assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
            assert fd.explain(model).last_call.path == "shared"
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "model.compile() does not apply to passes with shared context"
    ]
    assert frames() == 0
    assert torch.equal(model(**PROMPT).logits, logits)
    assert frames() == 1


def test_a_prefilled_cache_through_a_model_compiled_in_place(model):
    """A direct pass with a kept cache is correct, in stock's graphs except for attention."""
    fd.enable(model)
    ids = PROMPT["input_ids"]
    expected = model(ids).logits[:, -1]
    cache = fd.prefill(model, ids[:, :-1])
    model.compile(backend="eager")
    with torch.no_grad():
        logits = model(ids[:, -1:], **{CACHE: cache.fork()}).logits[:, -1]
    assert torch.allclose(logits, expected, atol=1e-5)


def test_a_compiled_copy_of_the_model(model):
    """`torch.compile(model)` forwards `generate` to the model itself, in stock as here."""
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    compiled = torch.compile(fd.enable(model), backend="eager")
    assert torch.equal(seeded(lambda: compiled.generate(**PROMPT, **SAMPLING)), expected)
    assert fd.explain(model).last_call.path == "shared"
