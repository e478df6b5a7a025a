"""Whole steps of GRPO by TRL's trainer, in parts: ``python -m tests.clients.grpo_step_on_gpu --out FILE``.

A model of the named shape with random weights in bf16 trains for some steps: stock, enabled with
`share_forward=False`, and enabled. Every rollout serves two steps (`num_iterations=2`), so that TRL computes the
log-probabilities of the completions after it, before the first update. A row has the seconds of such a step: of its
rollout, of these log-probabilities, and of all else, which is forward, backward, rewards and the optimizer. Two more
ways have rollouts that return log-probabilities, those of steps and a trainer's, and say how these agree with TRL's.
"""

from __future__ import annotations

import gc
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import TrainerCallback

import hf_fastdecode as fd
from hf_fastdecode.files import write_rows
from hf_fastdecode.measurement.calls import idle_time
from hf_fastdecode.measurement.rows import provenance
from hf_fastdecode.measurement.shapes import random_model

from .recording import recorded
from .training import make_trainer, rollout_of_page

_WAYS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "rollouts": {"share_forward": False},
    "enabled": {},
    "log-probs of steps": {},
    "log-probs of trainer": {"log_probs": "trainer"},
}
"""Ways, and the options of `enable` in each."""

_FIELDS = {"log-probs of steps": "logprobs", "log-probs of trainer": "processed_logprobs"}
"""Fields of `generate`'s output that rollouts return; at a temperature of 1 the first are comparable too."""

_PARTS = ("step_s", "rollout_s", "logprobs_s", "update_s")
_SHOWN = ("way", *_PARTS, "first_step_s", "peak_bytes", "same_bits", "largest_difference", "ran")


class _Steps(TrainerCallback):
    """Seconds of each step of the optimizer, and of what TRL scores without gradients in it."""

    def __init__(self, trainer: Any):
        self.device, self.seconds, self.scored = trainer.model.device, [], []
        self.differences: list[Tensor] = []  # of rollouts' log-probabilities from TRL's
        self._score = trainer._get_per_token_logps_and_entropies
        self._complete = trainer._generate_and_score_completions
        trainer._get_per_token_logps_and_entropies = self._timed
        trainer._generate_and_score_completions = self._compared

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.scored.append(0.0)
        self._began = idle_time(self.device)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(idle_time(self.device) - self._began)

    def _timed(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return self._score(*args, **kwargs)
        began = idle_time(self.device)
        found = self._score(*args, **kwargs)
        self.scored[-1] += idle_time(self.device) - began
        return found

    def _compared(self, inputs: Any) -> Any:
        found = self._complete(inputs)
        if (drawn := found.get("sampling_per_token_logps")) is not None:
            difference = (drawn - found["old_per_token_logps"]).abs()
            self.differences.append(difference[found["completion_mask"] > 0])
        return found


def main(
    out: Annotated[Path, typer.Option(help="CSV file of rows to write.")],
    way: Annotated[list[str] | None, typer.Option(help=f"Repeatable, all by default: {', '.join(_WAYS)}.")] = None,
    shape: Annotated[str, typer.Option(help="A shape of `benchmarks generate`; `embedded` in fp32.")] = "qwen3-4b",
    samples: Annotated[int, typer.Option(help="Completions of each prompt.")] = 16,
    prompts: Annotated[int, typer.Option(help="Prompts in a rollout.")] = 4,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a completion.")] = 256,
    shots: Annotated[int, typer.Option(help="Solved examples in front of each prompt.")] = 6,
    passes: Annotated[int, typer.Option(help="Passes of an update; TRL shuffles the rows between them.")] = 1,
    rollouts: Annotated[int, typer.Option(help="Rollouts, the first of which is not counted.", min=2)] = 2,
    device: Annotated[str, typer.Option(help="Where to train.")] = "cuda",
) -> None:
    """Train in each way, and write each row when it is measured."""
    rows = []
    for name in way or _WAYS:
        sizes = {"max_completion_length": new_tokens, "num_generations": samples, "max_steps": 2 * rollouts}
        sizes |= {"per_device_train_batch_size": samples * prompts // passes, "gradient_accumulation_steps": passes}
        with tempfile.TemporaryDirectory() as folder:
            model = None if shape == "embedded" else random_model(shape, device, torch.bfloat16)
            options = {"model": model, "shots": shots, "use_cpu": device == "cpu", "num_iterations": 2, **sizes}
            trainer: Any = make_trainer("grpo", Path(folder), **options)
            given = _WAYS[name]
            if given is not None:
                fd.enable(trainer.model, **given)
            if name in _FIELDS:
                trainer.rollout_func = rollout_of_page(_FIELDS[name])
            rows.append(provenance(device) | {"trl": version("trl"), "program": "TRL GRPO step", "model": shape})
            rows[-1] |= {"rows": samples * prompts, "new_tokens": new_tokens, "passes": passes, "way": name}
            rows[-1] |= _trained(
                trainer, samples * prompts, shared=given is not None, forward=name not in ("stock", "rollouts")
            )
        write_rows(out, rows)
        print({column: rows[-1][column] for column in _SHOWN}, flush=True)
        del trainer, model, options
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _trained(trainer: Any, rows: int, *, shared: bool, forward: bool) -> dict[str, Any]:
    """The measured columns of a run of a trainer."""
    model, cuda = trainer.model, trainer.model.device.type == "cuda"
    with recorded(model) as calls:
        steps = _Steps(trainer)
        trainer.add_callback(steps)
        trainer.train()
    assert calls.paths == {"shared" if shared else "stock"}, [call.reason for call in calls.made]
    assert {call.rows for call in calls.made} == {rows}
    report = fd.explain(model).last_forward if forward else None
    assert report is None or report.path == "shared", report
    whole, scored = (part[::2] for part in (steps.seconds, steps.scored))  # steps with a rollout
    drawn = [call.seconds for call in calls.made]
    update = [total - other - part for total, other, part in zip(whole, scored, drawn, strict=True)]
    parts = zip(_PARTS, (whole, drawn, scored, update), strict=True)
    return {
        **{name: median(part[1:]) for name, part in parts},
        "first_step_s": whole[0],
        "prompt_tokens": calls.made[0].padded_length,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        **_agreement(steps.differences),
        "ran": f"{report.computed:,} of {report.tokens:,} tokens computed" if report is not None else None,
    }


def _agreement(differences: list[Tensor]) -> dict[str, float | None]:
    """How log-probabilities of rollouts agree with TRL's; None where they return none."""
    if not differences:
        return {"same_bits": None, "largest_difference": None}
    found = torch.cat(differences)
    return {"same_bits": (found == 0).float().mean().item(), "largest_difference": found.max().item()}


if __name__ == "__main__":
    typer.run(main)
