"""Contexts divided between processes: in fp32 every call returns the tokens of one process's stock transformers."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.parallel import divided_pass

from .processes import Models, Seen, add_scenario
from .scenarios import by_pytorch, reason
from .sequence_calls import CALLS

NAMES = [(name, ranks) for name, call in CALLS.items() for ranks in call.ranks]


def compared(name: str, models: Models) -> Any:
    """Whether tokens are those of stock, and the call's path, reason and number of processes."""
    call = CALLS[name]
    model = call.make_model()
    torch.manual_seed(1)
    expected = model.generate(**call.prompts, **call.arguments)
    divided = mock.patch.object(divided_pass, "FEWEST_TOKENS", 2 if call.divides_prefill else 10**9)
    with divided, fd.enabled(model, sequence_parallel=models.group, **call.options):
        torch.manual_seed(1 + models.rank * call.seeds_differ)
        found = model.generate(**call.prompts, **call.arguments)
        return torch.equal(found, expected), reason(model), fd.explain(model).last_call.ranks


for name, ranks in NAMES:
    add_scenario(f"{name}-{ranks}", by_pytorch(partial(compared, name)), ranks)


@pytest.mark.parametrize(("name", "ranks"), NAMES, ids=[f"{name}-{ranks}" for name, ranks in NAMES])
def test_tokens_are_those_of_one_process(name: str, ranks: int, request: pytest.FixtureRequest) -> None:
    seen: dict[str, tuple[Seen, ...]] = request.getfixturevalue("seen" if ranks == 2 else "seen_by_four")
    for one in seen[f"{name}-{ranks}"]:
        assert one.error == "", one.trace
        same, path, count = one.value
        assert same
        assert path.startswith(CALLS[name].path)
        assert count == ranks
    assert len(seen[f"{name}-{ranks}"]) == ranks
