"""Prefill by PyTorch's operators, against attention by definition and PyTorch's own attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_fastdecode.attention.forest import Forest, Span
from hf_fastdecode.attention.torch_operators.operators import BackendError
from hf_fastdecode.attention.torch_operators.prefill_ops import Run, causal_attention

from .forests import (
    DTYPE_NAMES,
    FP64,
    LOW_AND_FULL,
    PROPERTY,
    Reads,
    assert_error_rule,
    make_inputs,
    pytorch_causal_attention,
    some_sinks,
)


def prefill_inputs(
    context: Sequence[int], length: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Queries, keys and values of a run, and what lies before it, all views of longer, poisoned storage."""
    kv_heads = heads[1]
    spans, stored = [], 2
    for tokens in (*context, length):
        spans.append(Span(0, stored, tokens))
        stored += tokens + 2
    paths = Forest.from_paths([tuple(spans)])
    _, kv = make_inputs(paths, [1], heads=heads[0], kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=device)
    query = torch.randn(heads[0], length, head_dim, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    *earlier, (keys, values) = (kv.node(span) for span in spans)
    return query, keys, values, [tuple(part) for part in earlier]


def prefill_oracle(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    context: Sequence[tuple[Tensor, Tensor]],
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Prefill by definition, in fp64, one query and head at a time."""
    heads, length, _ = query.shape
    every_key = torch.cat([part[0] for part in context] + [keys], 1).double()
    every_value = torch.cat([part[1] for part in context] + [values], 1).double()
    before = every_key.shape[1] - length
    out = torch.empty(heads, length, values.shape[-1], dtype=torch.float64, device=query.device)
    lse = torch.empty(heads, length, dtype=torch.float64, device=query.device)
    for head in range(heads):
        kv_head = head // (heads // keys.shape[0])
        for position in range(length):
            seen = slice(0 if window is None else max(0, before + position + 1 - window), before + position + 1)
            scores = every_key[kv_head, seen] @ query[head, position].double() * scale
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            lse[head, position] = torch.logsumexp(scores, 0)
            if sinks is not None:
                lse[head, position] = torch.logaddexp(lse[head, position], sinks[head].double())
            out[head, position] = torch.exp(scores - lse[head, position]) @ every_value[kv_head, seen]
    return out, lse


def attend_run(query: Tensor, keys: Tensor, values: Tensor, scale: float, earlier: Sequence, **scoring: Any) -> Tensor:
    """One run of tokens after others."""
    run = Run(query.shape[1], tuple(range(len(earlier))))
    return causal_attention(query, keys, values, scale, runs=[run], stored=earlier.__getitem__, **scoring)


@PROPERTY
@given(data=st.data())
def test_runs_of_a_pass_are_what_they_are_alone(device: str, data: st.DataObject) -> None:
    """Of equal and unequal lengths, over contexts that they share or not, side by side or apart."""
    kv_heads = data.draw(st.integers(1, 2))
    heads = kv_heads * data.draw(st.integers(1, 3))
    scoring = {"softcap": data.draw(st.none() | st.just(1.5)), "window": data.draw(st.none() | st.integers(1, 9))}
    scoring["sinks"] = some_sinks(heads, device) if data.draw(st.booleans()) else None
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))

    def normal(count: int, length: int) -> Tensor:
        return torch.randn(count, length, 8, generator=generator, dtype=torch.float64).to(device)

    contexts = [(normal(kv_heads, length), normal(kv_heads, length)) for length in (5, 1, 3)]
    paths = ((), (0,), (0, 1), (0, 2), (1,))
    drawn = data.draw(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(paths)), min_size=1, max_size=6))
    runs = [Run(length, path) for length, path in drawn]
    total = sum(run.length for run in runs)
    query, keys, values = normal(heads, total), normal(kv_heads, total), normal(kv_heads, total)
    together = causal_attention(query, keys, values, 0.5, runs=runs, stored=contexts.__getitem__, **scoring)
    start = 0
    for run in runs:
        own = slice(start, start + run.length)
        start = own.stop
        earlier = [contexts[name] for name in run.context]
        expected, _ = prefill_oracle(query[:, own], keys[:, own], values[:, own], 0.5, earlier, **scoring)
        torch.testing.assert_close(together[:, own], expected, **FP64)


def test_runs_of_a_pass_read_a_shared_context_once(device: str) -> None:
    query, keys, values, earlier = prefill_inputs((40, 30), 12, (4, 2), 64, torch.float32, device)
    earlier = [(part.clone(), value.clone()) for part, value in earlier]
    runs = [Run(4, (0, 1)), Run(3, (0,)), Run(5, (0, 1))]
    with Reads([tensor for part in earlier for tensor in part]) as reads:
        causal_attention(query, keys, values, 0.2, runs=runs, stored=earlier.__getitem__)
    assert list(reads.count.values()) == [1] * 4


@pytest.mark.parametrize(
    ("softcap", "backend"),
    [(None, "auto"), (None, "plain"), (None, "fused"), (3.0, "auto"), (3.0, "plain")],
    ids=["auto", "plain", "fused", "softcap3-auto", "softcap3-plain"],
)
@pytest.mark.parametrize("dtype", LOW_AND_FULL, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize(
    ("context", "length", "heads", "head_dim"),
    [
        pytest.param((), 1, (2, 2), 16, id="alone-m1-h2g2-d16"),
        pytest.param((), 63, (4, 2), 64, id="alone-m63-h4g2-d64"),
        pytest.param((1,), 17, (4, 4), 80, id="after1-m17-h4g4-d80"),
        pytest.param((63,), 1, (4, 1), 128, id="after63-m1-h4g1-d128"),
        pytest.param((200, 1, 17), 31, (6, 2), 64, id="after200+1+17-m31-h6g2-d64"),
    ],
)
def test_prefill_error_is_at_most_twice_pytorchs_own(
    context: tuple[int, ...],
    length: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    softcap: float | None,
    backend: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hf_fastdecode.attention.torch_operators.prefill_ops._MASKED_QUERIES", 8)
    if backend == "fused":  # one that "auto" leaves to PyTorch to choose when nothing lies before the run
        backend = "cpu" if device == "cpu" else "efficient" if dtype == torch.float32 else "flash"
    query, keys, values, earlier = prefill_inputs(context, length, heads, head_dim, dtype, device)
    out = attend_run(query, keys, values, 0.2, earlier, softcap=softcap, backend=backend)
    assert out.dtype == dtype
    oracle, lse = prefill_oracle(query, keys, values, 0.2, earlier, softcap)
    every_key, every_value = (
        torch.cat([part[which] for part in earlier] + [run], 1) for which, run in enumerate((keys, values))
    )
    yardstick = pytorch_causal_attention(query, every_key, every_value, 0.2, softcap)
    assert_error_rule(out, yardstick, oracle, lse)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["nocap", "softcap3"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["nosinks", "sinks"])
@pytest.mark.parametrize("dtype", LOW_AND_FULL, ids=DTYPE_NAMES.get)
@pytest.mark.parametrize("window", [None, 1, 7, 30, 60, 100])
def test_windowed_prefill_keeps_the_error_rule(
    window: int | None,
    dtype: torch.dtype,
    with_sinks: bool,
    softcap: float | None,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows that end in the run and at every depth above it; what no query sees is not read."""
    monkeypatch.setattr("hf_fastdecode.attention.torch_operators.prefill_ops._MASKED_QUERIES", 8)
    query, keys, values, earlier = prefill_inputs((20, 1, 17), 31, (6, 2), 64, dtype, device)
    scoring = {"softcap": softcap, "window": window, "sinks": some_sinks(6, device) if with_sinks else None}
    every_key, every_value = (
        torch.cat([part[which] for part in earlier] + [run], 1) for which, run in enumerate((keys, values))
    )
    oracle, lse = prefill_oracle(query, keys, values, 0.2, earlier, **scoring)
    yardstick = pytorch_causal_attention(query, every_key, every_value, 0.2, **scoring)
    if window is not None:
        hidden = 38
        for part in earlier:
            count = min(part[0].shape[1], max(0, hidden - window + 1))
            hidden -= part[0].shape[1]
            for stored in part:
                stored[:, :count] = torch.nan
    out = attend_run(query, keys, values, 0.2, earlier, **scoring)
    assert out.dtype == dtype
    assert_error_rule(out, yardstick, oracle, lse)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["nocap", "softcap3"])
@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_prefill_reads_its_context_once_and_never_copies_it(backend: str, softcap: float | None, device: str) -> None:
    query, keys, values, earlier = prefill_inputs((400, 300), 7, (4, 2), 64, torch.float32, device)
    earlier = [(part.clone(), value.clone()) for part, value in earlier]
    with Reads([tensor for part in earlier for tensor in part]) as reads:
        attend_run(query, keys, values, 0.2, earlier, softcap=softcap, backend=backend)
    assert list(reads.count.values()) == [1] * 4


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["nocap", "softcap3"])
@pytest.mark.parametrize("lengths", [(4, 3, 5), (3, 3, 3)], ids=["unequal", "equal"])
def test_gradients_of_runs_of_a_pass_are_those_they_have_alone(
    lengths: tuple[int, ...], softcap: float | None, device: str
) -> None:
    """With contexts of all runs, of adjacent ones, and of one."""
    generator = torch.Generator().manual_seed(0)

    def normal(count: int, length: int) -> Tensor:
        drawn = torch.randn(count, length, 8, generator=generator, dtype=torch.float64)
        return drawn.to(device).requires_grad_()

    total = sum(lengths)
    query, keys, values = normal(4, total), normal(2, total), normal(2, total)
    contexts = [(normal(2, length), normal(2, length)) for length in (5, 3, 2)]
    inputs = [query, keys, values, *(part for context in contexts for part in context)]
    runs = [Run(length, path) for length, path in zip(lengths, ((0, 1), (0, 1, 2), (0,)), strict=True)]
    together = causal_attention(query, keys, values, 0.5, runs=runs, stored=contexts.__getitem__, softcap=softcap)
    alone, start = [], 0
    for run in runs:
        own = slice(start, start + run.length)
        start = own.stop
        earlier = [contexts[name] for name in run.context]
        alone.append(attend_run(query[:, own], keys[:, own], values[:, own], 0.5, earlier, softcap=softcap))
    weights = torch.randn(together.shape, generator=generator, dtype=torch.float64).to(device)
    found = torch.autograd.grad((together * weights).sum(), inputs)
    expected = torch.autograd.grad((torch.cat(alone, 1) * weights).sum(), inputs)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **FP64)


def test_prefill_refuses_a_backend_that_cannot_run() -> None:
    query, keys, values, earlier = prefill_inputs((3,), 5, (2, 1), 16, torch.float32, "cpu")
    with pytest.raises(BackendError, match=r"'flash' cannot run: .*'cpu'"):
        attend_run(query, keys, values, 0.2, earlier, backend="flash")
    with pytest.raises(BackendError, match=r"backend='cpu' cannot run: .* a sliding window in prefill; use backend="):
        attend_run(query, keys, values, 0.2, earlier, window=2, backend="cpu")
