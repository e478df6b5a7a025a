"""Long completions: what rows have drawn is attended to as nodes of one row each."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.launch import plan, step_tables
from hf_fastdecode.attention.launch import plan as own_nodes
from hf_fastdecode.attention.launch.plan import (
    HeadShape,
    OwnNodes,
    choose_own_nodes,
    own_nodes_dominate,
    own_tokens,
    with_own_nodes,
)
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.generation.steps.captures import Captures

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .calls import as_in_stock
from .uncaptured import on_the_cpu

pytest.importorskip("triton")
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
CALL = {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "max_new_tokens": 10}


@pytest.fixture
def short_steps(monkeypatch):
    """Own nodes that grow by four tokens; which forests the kernels went over."""
    monkeypatch.setattr(own_nodes, "STEP", 4)
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    seen: list[Forest] = []
    extended = step_tables.with_own_nodes

    def note(forest, tokens):
        seen.append(extended(forest, tokens))
        return seen[-1]

    monkeypatch.setattr(step_tables, "with_own_nodes", note)
    return seen


def own_lengths(seen):
    """Lengths of own nodes, as they came."""
    lengths = [max((node.span.length for node in forest.nodes if node.span.segment < 0), default=0) for forest in seen]
    return [length for length, before in zip(lengths, [None, *lengths]) if length != before and length != 1]


def test_a_node_below_every_path():
    forest = Forest(3, [Node(Span(0, 0, 5), 0, 3), Node(Span(0, 5, 2), 1, 1, 1)])
    assert with_own_nodes(forest, 0) is forest
    found = with_own_nodes(forest, 16)
    assert found.context_lengths == (21, 23, 21)
    assert [path[-1] for path in found.paths] == [Span(-1, 0, 16), Span(-2, 0, 16), Span(-3, 0, 16)]
    assert [own_tokens(length) for length in (0, 127, 128, 255, 1000)] == [0, 0, 128, 128, 896]


@on_the_cpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_tokens_are_stocks(mode, short_steps):
    model = tiny_model(**SMALL)
    call = ragged_prompts(21, 17, shared=14) | CALL
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model, mode=mode, backend="triton", min_saved_tokens=1):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        assert fd.explain(model).last_call.mode == mode
        assert own_lengths(short_steps)[-2:] == [4, 8]
        # Another call through the tables of the first, which ended with own nodes.
        again = ragged_prompts(18, seed=4) | CALL
        shared = seeded(lambda: model.generate(**again))
    assert torch.equal(shared, seeded(lambda: model.generate(**again)))


@on_the_cpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_rows_that_leave(mode, short_steps, monkeypatch):
    """Suffixes move to other storage while they are nodes."""
    monkeypatch.setattr(modes, "_STEPS_OF_A_CAPTURE", 0)
    model = tiny_model(**SMALL)
    call = ragged_prompts(21, 17, shared=14) | CALL | {"eos_token_id": list(range(3, 16)), "max_new_tokens": 12}
    report = as_in_stock(model, lambda: model.generate(**call), mode=mode, backend="triton", min_saved_tokens=1)
    assert report.compactions >= 1
    assert 4 in own_lengths(short_steps)


@on_the_cpu
def test_a_conversation_goes_on_behind_own_nodes(short_steps):
    """Cropping, forking, and a second call over what the first has drawn."""
    model = tiny_model(**SMALL)
    prompt = ragged_prompts(19)
    with fd.enabled(model, backend="triton", min_saved_tokens=1):
        out = seeded(lambda: model.generate(**prompt, **CALL, return_dict_in_generate=True))
        cache, ids = out[CACHE], out.sequences
        assert own_lengths(short_steps)[-1] == 8
        found = []
        for keep in (22, 27):
            fork = cache.fork()
            fork.crop(keep - fork.get_seq_length())
            with torch.no_grad():
                found.append(model(ids[:, keep : keep + 1], **{CACHE: fork}).logits[:, -1])
    for keep, logits in zip((22, 27), found):
        assert torch.allclose(logits, model(ids[:, : keep + 1]).logits[:, -1], atol=1e-4)


@on_the_cpu
def test_windows_keep_their_suffixes(short_steps):
    """A window's suffix kernel reads no more than the window, however long the suffix is."""
    model = tiny_model("mistral", num_hidden_layers=1, sliding_window=12)
    call = ragged_prompts(21) | CALL
    as_in_stock(model, lambda: model.generate(**call), mode="graph", backend="triton", min_saved_tokens=1)
    assert own_lengths(short_steps) in ([], [0])


def test_many_rows_fill_the_gpu_by_themselves():
    """Of four multiprocessors, as which the interpreter counts."""

    def chosen(rows, kv_heads, group, *, dominate=False, windowed=False):
        shape = HeadShape(kv_heads, group, head_dim=64, windowed=windowed)
        return choose_own_nodes(rows, shape, torch.device("cpu"), dominate=dominate)

    assert chosen(8, 2, 1) == OwnNodes(used=True)
    assert chosen(17, 1, 1) == OwnNodes()
    assert chosen(2, 1, 12) == OwnNodes(used=True)
    assert chosen(3, 1, 12) == OwnNodes()
    assert chosen(3, 1, 12, dominate=True) == OwnNodes(used=True, dominate=True)
    assert chosen(9, 1, 12, dominate=True) == OwnNodes()
    assert chosen(8, 2, 1, dominate=True, windowed=True) == OwnNodes()  # a window's layer reads no long suffixes


def test_completions_four_times_as_long_as_what_is_shared():
    def dominate(rows, tokens, length):
        return own_nodes_dominate(Forest(rows, [Node(Span(0, 0, tokens), 0, rows)] if tokens else []), length)

    assert [dominate(4, 256, length) for length in (0, 255, 256)] == [False, False, True]
    assert not dominate(3, 256, 10_000)  # measured from four rows on
    assert not dominate(4, 0, 127)
    assert dominate(4, 0, 128)


# What rows draw holds four times as many keys as the prompt after 8 tokens.
LONG_CALL = CALL | {"num_return_sequences": 4, "min_new_tokens": 14, "max_new_tokens": 14}


@on_the_cpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_launch_parameters_change_as_completions_grow(mode, short_steps, monkeypatch):
    """A captured step is captured again. The tokens stay stock's."""
    model = tiny_model(**SMALL)
    call = ragged_prompts(9) | LONG_CALL
    stock = seeded(lambda: model.generate(**call))
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_RECAPTURE", 2)
    planned = []
    choose = plan.decode_config

    def note(*arguments, own_dominate):
        planned.append(own_dominate)
        return choose(*arguments, own_dominate=own_dominate)

    monkeypatch.setattr(plan, "decode_config", note)
    with fd.enabled(model, mode=mode, backend="triton", min_saved_tokens=1):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        assert fd.explain(model).last_call.captures == (2 if mode == "graph" else 0)
        assert planned == sorted(planned)
        assert set(planned) == {False, True}
        if mode == "graph":  # the next call begins with the first capture and goes on with the second
            assert torch.equal(seeded(lambda: model.generate(**call)), stock)
            assert state_of(model).captures.count == 2


@on_the_cpu
def test_a_failed_capture_for_completions(short_steps, monkeypatch):
    """The first capture goes on."""
    model = tiny_model(**SMALL)
    call = ragged_prompts(9) | LONG_CALL
    stock = seeded(lambda: model.generate(**call))
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_RECAPTURE", 2)
    find, found = Captures.find, []

    def fail(self, *arguments):
        found.append(arguments)
        if len(found) > 1:
            raise torch.OutOfMemoryError("no room")
        return find(self, *arguments)

    monkeypatch.setattr(Captures, "find", fail)
    with fd.enabled(model, mode="graph", backend="triton", min_saved_tokens=1):
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
    assert len(found) == 2
