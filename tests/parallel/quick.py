"""One call in two processes, which `make quick` runs: `make test` has it among all scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import hf_fastdecode as fd

from ..tiny_models import tiny_model
from .processes import Models, run_scenarios, scenario
from .scenarios import SAMPLING, by_pytorch, draw, reason, values


@scenario
@by_pytorch
def samples_of_a_divided_context(models: Models) -> Any:
    model = tiny_model("llama-gqa")
    arguments = SAMPLING | {"max_new_tokens": 6}
    expected = draw(model, 0, **arguments)
    with fd.enabled(model, sequence_parallel=models.group):
        return draw(model, 0, **arguments) == expected, reason(model), torch.distributed.get_world_size(models.group)


def test_two_processes_give_the_tokens_of_one(tmp_path: Path) -> None:
    for same, path, ranks in values(run_scenarios(["quick"], {}, tmp_path), "samples_of_a_divided_context"):
        assert (same, path.partition(":")[0], ranks) == (True, "shared", 2)
