"""Prefill by the kernel: whole passes, against the fp64 oracle and PyTorch's own attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest, Span
from hf_fastdecode.attention.kv import ForestKV, Scoring, Segment
from hf_fastdecode.attention.launch import kernel_call as prefill
from hf_fastdecode.attention.torch_operators.prefill_ops import PackedRuns, Run
from hf_fastdecode.kernels.failures import Kernel, forget

from .forests import DEVICES, assert_error_rule, make_inputs, pytorch_attention, some_sinks

SPANS = (Span(0, 3, 200), Span(0, 210, 1), Span(0, 220, 90))
"""Contexts that lie in poisoned storage."""

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")


def check_pass(
    runs: Sequence[tuple[int, Sequence[int]]],
    *,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    device: str,
) -> None:
    """A pass over runs of these lengths, each after some of `SPANS`."""
    paths = [tuple(SPANS[index] for index in path) for _, path in runs]
    whole, kv = make_inputs(
        Forest.from_paths([SPANS] * len(runs)),
        [length for length, _ in runs],
        heads=heads[0],
        kv_heads=heads[1],
        queries=min(length for length, _ in runs),
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    generator = torch.Generator().manual_seed(1)
    queries = [
        torch.randn(heads[0], length, whole.shape[-1], generator=generator).to(device, dtype) for length, _ in runs
    ]
    own = [Segment(*(part[row, :, :length] for part in kv.suffix)) for row, (length, _) in enumerate(runs)]
    sinks = some_sinks(heads[0], device) if with_sinks else None
    # As models hand them over: the tokens' heads side by side.
    query, keys, values = (
        torch.cat(parts, 1).transpose(0, 1).contiguous().transpose(0, 1)
        for parts in (queries, [part.keys for part in own], [part.values for part in own])
    )
    scoring = {"softcap": softcap, "window": window, "sinks": sinks}
    expected = []
    for row, (path, one) in enumerate(zip(paths, queries, strict=True)):
        alone = ForestKV(
            Forest.from_paths([path]), kv.segments, Segment(*(part[row : row + 1] for part in kv.suffix)), runs[row][0]
        )
        oracle, lse = reference.forest_attention(one[None], alone, **scoring)
        expected.append((pytorch_attention(one[None], alone, **scoring), oracle, lse))
    if window is not None and len(runs) == 1:  # what no query sees is not read
        before = sum(span.length for span in paths[0])
        for span in paths[0]:
            hidden = min(span.length, max(0, before - window + 1))
            before -= span.length
            for part in kv.node(span):
                part[:, :hidden] = torch.nan
    out = prefill.kernel_attention(
        query,
        keys,
        values,
        Scoring(head_dim**-0.5, softcap, window, sinks),
        PackedRuns([Run(length, path) for (length, _), path in zip(runs, paths, strict=True)]),
        kv.node,
    )
    assert out is not None and out.dtype == dtype
    outs = out.split([length for length, _ in runs], 1)
    for mine, of_run in zip(outs, expected, strict=True):
        assert_error_rule(mine[None], *of_run)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are preferred on a CPU too, in small tiles."""
    from hf_fastdecode.kernels.prefill import api

    monkeypatch.setattr(prefill, "on_gpu", lambda _: True)
    monkeypatch.setattr(api, "choose_config", lambda *_: api.Config(32, 16, 4, 1))


@without_gpu
@pytest.mark.parametrize(
    ("runs", "heads", "head_dim", "dtype", "window", "softcap", "with_sinks"),
    [
        pytest.param([(37, ())], (4, 2), 16, torch.float16, 9, 3.0, False, id="alone-w9-softcap3-d16-fp16"),
        pytest.param(
            [(5, (2,)), (1, ()), (11, (1, 2))],
            (3, 1),
            48,
            torch.float32,
            None,
            3.0,
            True,
            id="softcap3-sinks-d48-fp32",
        ),
        pytest.param([(6, (2, 1)), (7, (2,))], (2, 2), 16, torch.float16, 8, None, True, id="w8-sinks-d16-fp16"),
        pytest.param([(9, (1,)), (70, ())], (6, 2), 16, torch.float32, 64, None, False, id="w64-d16-fp32"),
    ],
)
def test_interpreted_kernel_keeps_the_error_rule(
    runs: list[tuple[int, Sequence[int]]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    interpreted: None,
) -> None:
    pytest.importorskip("triton")
    scores = {"window": window, "softcap": softcap, "with_sinks": with_sinks}
    check_pass(runs, heads=heads, head_dim=head_dim, dtype=dtype, device="cpu", **scores)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    [(None, 50.0, False), (None, 3.0, True), (1, None, False), (7, 50.0, True), (128, None, True), (250, 3.0, False)],
    ids=["softcap50", "softcap3-sinks", "w1", "w7-softcap50-sinks", "w128-sinks", "w250-softcap3"],
)
@pytest.mark.parametrize(
    ("runs", "heads", "head_dim"),
    [
        pytest.param([(1000, ())], (16, 8), 256, id="alone-m1000-h16g8-d256"),
        pytest.param([(1, (0,)), (63, (0, 1)), (300, (0, 1, 2)), (300, ())], (6, 2), 96, id="after-h6g2-d96"),
        pytest.param([(129, (2,)), (513, (2,))], (64, 8), 64, id="after90-m129+513-h64g8-d64"),
        pytest.param([(257, (0, 2))], (8, 8), 128, id="after200+90-m257-h8g8-d128"),
        pytest.param([(5, (0, 1))] * 40, (7, 1), 80, id="after201-40xm5-h7g1-d80"),
    ],
)
def test_kernel_keeps_the_error_rule(
    runs: list[tuple[int, Sequence[int]]],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
) -> None:
    scores = {"window": window, "softcap": softcap, "with_sinks": with_sinks}
    check_pass(runs, heads=heads, head_dim=head_dim, dtype=dtype, device="cuda", **scores)


@pytest.mark.parametrize("device", DEVICES)
def test_other_attention_is_left_to_pytorch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "on_gpu", lambda _: True)
    runs = PackedRuns([Run(12)])

    def attend(dtype: torch.dtype = torch.float16, value_dim: int = 16, **scoring: float) -> bool:
        query, keys = (torch.zeros(heads, 12, 16, dtype=dtype, device=device) for heads in (4, 2))
        values = torch.zeros(2, 12, value_dim, dtype=dtype, device=device)
        return (
            prefill.kernel_attention(query, keys, values, Scoring(0.25, **scoring), runs, lambda _: (keys, values))
            is not None
        )

    assert not attend()
    assert not attend(window=12), "hides nothing"
    assert device == "cpu" or not attend(torch.float32, window=3)
    assert not attend(value_dim=32, softcap=3.0)
    query = torch.zeros(2, 12, 16, dtype=torch.float16, device=device)
    learned = query.clone().requires_grad_()
    after = PackedRuns([Run(12, ("learned",))])
    assert prefill.kernel_attention(query, query, query, Scoring(1.0, 3.0), after, lambda _: (learned, query)) is None
    monkeypatch.setattr(prefill, "refusal", lambda *_: "it failed before")
    assert not attend(window=3)


@without_gpu
def test_a_kernel_that_fails_leaves_its_passes_to_pytorch(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fastdecode.kernels.prefill import api

    tried = []

    def fails(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise RuntimeError("not here")

    monkeypatch.setattr(api, "launch", fails)
    query = torch.zeros(2, 5, 16)
    try:
        for _ in range(2):
            runs = PackedRuns([Run(5)])
            assert (
                prefill.kernel_attention(query, query, query, Scoring(1.0, 3.0), runs, lambda _: (query, query))
                is None
            )
        assert len(tried) == 1
    finally:
        forget(Kernel.PREFILL)


def test_intervals_are_those_of_the_definition() -> None:
    """Every token, and no key of a context that its window hides."""
    lengths = {"a": 5, "b": 1, "c": 3}
    runs = [Run(4, ("a", "b")), Run(2), Run(3, ("a", "c"))]

    def stored(name: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(1, lengths[str(name)], 1), torch.empty(0)

    for window in (None, *range(1, 14)):
        own, contexts = PackedRuns(runs).intervals(torch.device("cpu"), window, stored)
        assert own[0].tolist() == list(range(9))
        seen = {None: own.T.tolist(), **{name: part.T.tolist() for name, part in contexts}}
        expected: dict[object, list[list[int]]] = {None: [], "a": [], "b": [], "c": []}
        start = 0
        for run in runs:
            before = sum(lengths[str(name)] for name in run.context)
            for token in range(run.length):
                oldest = 0 if window is None else before + token - window + 1  # counted from the first context on
                expected[None].append([start + token, start + max(0, oldest - before), start + token])
                first = 0
                for name in run.context:
                    count = lengths[str(name)]
                    if max(0, oldest - first) < count:
                        expected[name].append([start + token, max(0, oldest - first), count - 1])
                    first += count
            start += run.length
        assert seen == {name: part for name, part in expected.items() if part}
