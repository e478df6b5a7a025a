"""That comparisons of shared passes with stock fail: every kind of fault, planted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_fastdecode.forward import packed, rows, seam
from hf_fastdecode.forward.trie import Node, Tree

from ..tiny_models import tiny_model
from . import all_classes
from .batches import Batch
from .comparison import exact_of, in_doubles, outcome
from .test_fuzz import check, models_of

CONTEXT = tuple(range(3, 20))
BATCH = Batch(
    ((*CONTEXT, 30, 31, 32), (*CONTEXT, 33, 34), (*CONTEXT, 30, 35)), left=(0, 1, 1), hidden=True, use_cache=False
)


def output(change):
    """A fault in the hidden states of all rows."""
    to_rows = seam.to_rows
    return lambda patch: patch.setattr(seam, "to_rows", lambda *inputs: change(to_rows, *inputs))


def attention(**fault):
    """A fault in what layers attend to."""
    attend = packed.attend

    def changed(query, key, value, tree, scoring):
        tree = fault.get("tree", lambda one: one)(tree)
        return attend(query, key, value, tree, replace(scoring, **{k: v for k, v in fault.items() if k != "tree"}))

    return lambda patch: patch.setattr(packed, "attend", changed)


def with_padding(to_rows, hidden, index):
    return to_rows(hidden, index) + (index == hidden.shape[1])[..., None]


def of_first_places(to_rows, hidden, index):
    """Gradients of one row only."""
    found = to_rows(hidden, index)
    return torch.cat([found[:1], found[1:].detach()])


def siblings(tree):
    """Each node continues the one before it in the packed row."""
    return Tree(tuple(Node(node.start, node.length, at - 1) for at, node in enumerate(tree.nodes)))


def apart(tree):
    return Tree(tuple(node._replace(parent=-1) for node in tree.nodes))


def later_positions(patch):
    first = rows._first
    patch.setattr(rows, "_first", lambda positions: first(positions) + 1)


FAULTS = {
    "another-row": ("llama-gqa", output(lambda to_rows, hidden, index: to_rows(hidden, index.roll(1, 0)))),
    "another-token": ("llama-gqa", output(lambda to_rows, hidden, index: to_rows(hidden, index.roll(1, 1)))),
    "padding": ("llama-gqa", output(with_padding)),
    "gradients-of-one-row": ("llama-gqa", output(of_first_places)),
    "half-precision": ("llama-gqa", output(lambda to_rows, hidden, index: to_rows(hidden.bfloat16().float(), index))),
    "rounding": ("llama-gqa", output(lambda to_rows, hidden, index: to_rows(hidden * (1 + 5e-6), index))),
    "other-paths": ("llama-gqa", attention(tree=siblings)),
    "no-paths": ("llama-gqa", attention(tree=apart)),
    "positions": ("gpt2", later_positions),
    "soft-cap": ("gemma2", attention(softcap=None)),
    "window": ("gemma2", attention(window=None)),
    "narrower-window": ("mixtral-window", attention(window=8)),
    "sinks": ("gpt_oss", attention(sinks=None)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, monkeypatch):
    name, plant = FAULTS[fault]
    batch = replace(BATCH, positions="columns", left=(0, 0, 0)) if fault == "positions" else BATCH
    check(name, batch)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(name, batch)


def test_a_pass_that_shares_less_is_found(monkeypatch):
    check("qwen3", BATCH)
    trie = rows.Batch.trie
    monkeypatch.setattr(rows.Batch, "trie", lambda self, **options: trie(self, **options | {"least": 18}))
    with pytest.raises(AssertionError):
        check("qwen3", BATCH)


def test_models_in_float64_compute_in_float64():
    """Norms, softmaxes and routers too, which transformers computes in float32: sums of many terms show it."""
    _, doubles = models_of("gpt_oss")
    assert {one.dtype for one in doubles.parameters()} == {torch.float64}
    inside = exact_of(doubles, lambda one: outcome(one, BATCH))["logits"]
    outside = outcome(doubles, BATCH)["logits"]
    assert inside.dtype == outside.dtype == torch.float64
    assert 1e-9 < (inside - outside).norm() / inside.norm() < 1e-5


CLASSES = ["GPT2ForSequenceClassification", "LlamaForCausalLM", "OPTForCausalLM", "RobertaForCausalLM"]


@pytest.mark.parametrize("name", CLASSES)
def test_classes(name):
    verdict = all_classes.verdict_on(name)
    assert verdict.kind == ("stock" if name.startswith("Roberta") else "shared"), verdict.reason


@pytest.mark.parametrize(
    ("plant", "kind"), [(output(with_padding), "shared"), (FAULTS["gradients-of-one-row"][1], "wrong")]
)
def test_wrong_classes_are_found(plant, kind, monkeypatch):
    """What is given for padding is no fault of a class, gradients of one row are."""
    plant(monkeypatch)
    assert all_classes.verdict_on("LlamaForCausalLM").kind == kind


def test_classes_that_raise_are_found(monkeypatch):
    monkeypatch.setattr(seam, "to_rows", None)
    assert all_classes.verdict_on("LlamaForCausalLM").kind == "crashed"


def test_models_in_doubles_are_in_doubles():
    model = in_doubles(tiny_model("gpt_oss"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
