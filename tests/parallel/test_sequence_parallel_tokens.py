"""Contexts divided between processes: in fp32 every call returns the tokens of one process's stock transformers."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.report import ParallelReport
from hf_fastdecode.parallel import sequence, shards

from ..cases import exhaustive_but
from .processes import Models, Seen, add_scenario
from .scenarios import by_pytorch, reason
from .sequence_calls import CALLS

NAMES = [(name, ranks) for name, call in CALLS.items() for ranks in call.ranks]


def compared(name: str, models: Models) -> Any:
    """Whether tokens are those of stock, and the call's path, reason, number of processes and how they computed it."""
    call = CALLS[name]
    model = call.make_model()
    torch.manual_seed(1)
    expected = model.generate(**call.prompts, **call.arguments)
    divided = mock.patch.object(shards, "FEWEST_TOKENS", 2 if call.divides_prefill else 10**9)
    blocks = mock.patch.object(sequence, "SUFFIX_BLOCK", call.block)
    with divided, blocks, fd.enabled(model, sequence_parallel=models.group, **call.options):
        torch.manual_seed(1 + models.rank * call.seeds_differ)
        found = model.generate(**call.prompts, **call.arguments)
        report = fd.explain(model).last_call
        return torch.equal(found, expected), reason(model), report.ranks, report.parallel and asdict(report.parallel)


for name, ranks in NAMES:
    add_scenario(f"{name}-{ranks}", by_pytorch(partial(compared, name)), ranks)


@pytest.mark.parametrize(
    ("name", "ranks"),
    exhaustive_but([(name, 2) for name in CALLS], NAMES),
    ids=[f"{name}-{ranks}" for name, ranks in NAMES],
)
def test_tokens_are_those_of_one_process(name: str, ranks: int, request: pytest.FixtureRequest) -> None:
    if "backend" in CALLS[name].options:
        pytest.importorskip("triton")
    seen: dict[str, tuple[Seen, ...]] = request.getfixturevalue("seen" if ranks == 2 else "seen_by_four")
    assert len(seen[f"{name}-{ranks}"]) == ranks
    stored, parallel, layers = 0, None, CALLS[name].config.get("num_hidden_layers", 2)
    for one in seen[f"{name}-{ranks}"]:
        assert one.error == "", one.trace
        same, path, count, parallel = one.value
        assert same
        assert path.startswith(CALLS[name].path)
        assert count == ranks
        if path.startswith("shared"):
            assert (parallel["kind"], parallel["ranks"], parallel["collectives"]) == ("sequence", ranks, layers)
            stored += parallel["stored_tokens"]
    assert stored == (parallel or {}).get("tokens", 0)


def test_reports_say_what_is_stored_here(seen: dict[str, tuple[Seen, ...]]) -> None:
    parts = [ParallelReport(**one.value[3]) for one in seen["one-row-2"]]
    assert [str(part) for part in parts] == [
        f"context is divided between 2 processes: {stored} of 94 tokens are stored here, 2 collectives in each step"
        for stored in (44 + 4, 43 + 3)
    ]
