"""GRPO by TRL's trainer in each way of making rollouts: ``python -m tests.clients.grpo_on_gpu --out FILE``.

A model of the named shape with random weights in bf16 trains for some steps: stock, with TRL's option for
transformers' continuous batching, and enabled. Before its row is written, the enabled run shows that its rollouts use
the weights that the optimizer has changed, by steps captured before the change, and that what it saves is an ordinary
checkpoint of these weights.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl

import hf_fastdecode as fd
from hf_fastdecode.files import write_rows
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.measurement.rows import provenance
from hf_fastdecode.measurement.shapes import random_model

from .recording import CONTINUOUS_BATCHING, Calls, recorded
from .training import make_trainer

_WAYS: dict[str, dict[str, Any]] = {
    "stock": {},
    "continuous-batching": {"use_transformers_continuous_batching": True},
    "enabled": {},
}
"""Ways of making rollouts, and what `GRPOConfig` is given for each."""

_PATHS = {"stock": "stock", "continuous-batching": CONTINUOUS_BATCHING, "enabled": "shared"}
_SHOWN = ("way", "first_rollout_s", "rollout_s", "extra_bytes", "prefilled_tokens", "ran")

_ERROR_OF_STOCK = 2.0
"""How many times stock's own rounding error that of an enabled model may be, see the package's invariants."""


class _StopAfter(TrainerCallback):
    """Ends training after so many rollouts, before the last one's step of the optimizer, which would take as long."""

    def __init__(self, calls: Calls, rollouts: int):
        self.calls, self.rollouts = calls, rollouts

    def on_substep_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        control.should_training_stop |= len(self.calls.made) >= self.rollouts


def main(
    out: Annotated[Path, typer.Option(help="CSV file of rows to write.")],
    way: Annotated[list[str] | None, typer.Option(help=f"Repeatable, all by default: {', '.join(_WAYS)}.")] = None,
    shape: Annotated[str, typer.Option(help="A shape of `python -m benchmarks generate`.")] = "qwen3-4b",
    samples: Annotated[int, typer.Option(help="Completions of each prompt.")] = 16,
    prompts: Annotated[int, typer.Option(help="Prompts in a rollout.")] = 4,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a completion.")] = 256,
    shots: Annotated[int, typer.Option(help="Solved examples in front of each prompt.")] = 6,
    rollouts: Annotated[int, typer.Option(help="Rollouts, between which the optimizer takes a step.", min=2)] = 4,
    device: Annotated[str, typer.Option(help="Where to train.")] = "cuda",
) -> None:
    """Train in each way, check the enabled one, and write each row when it is measured."""
    rows = []
    for name in way or _WAYS:
        model = random_model(shape, device, torch.bfloat16)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(
                "grpo",
                Path(folder),
                model=model,
                shots=shots,
                use_cpu=device == "cpu",
                max_completion_length=new_tokens,
                num_generations=samples,
                per_device_train_batch_size=samples,
                gradient_accumulation_steps=prompts,
                max_steps=rollouts,
                **_WAYS[name],
            )
            before: dict[str, Tensor] = {}
            if name == "enabled":
                fd.enable(trainer.model)
                before = {key: value.detach().clone() for key, value in model.named_parameters()}
            with recorded(trainer.model) as calls:
                trainer.add_callback(_StopAfter(calls, rollouts))
                trainer.train()
            ran = _checked(trainer, shape, calls, before, Path(folder)) if name == "enabled" else calls.made[-1].reason
        rows.append(_row(name, shape, samples * prompts, new_tokens, calls, ran, device))
        write_rows(out, rows)
        print({column: rows[-1][column] for column in _SHOWN}, flush=True)
        del trainer, model, before
        gc.collect()
        torch.cuda.empty_cache()


def _checked(trainer: Trainer, shape: str, calls: Calls, before: dict[str, Tensor], folder: Path) -> str:
    """How an enabled model's steps ran, after a look at its weights, logits and checkpoint."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    changed = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
    assert len(changed) > len(before) // 2, "training changed too little to show anything"

    # As the trainer does around its rollouts; the name changed in transformers 5.23.
    getattr(model, "activation_checkpointing_disable", model.gradient_checkpointing_disable)()
    # The last rollout again: the steps captured before the last change serve it.
    call, inputs, captures = fd.explain(model).last_call, calls.made[-1].inputs, state_of(model).captures
    captured = captures.count
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_new_tokens": 64}
    found = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    assert fd.explain(model).last_call.path == "shared"
    assert captures.count == captured, "the steps of earlier rollouts would have served"
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    padding = int((mask[0] == 0).sum())
    _compare_logits(model, shape, before, ids.shape[1] - padding, found.sequences[:1, padding:], found.logits)

    trainer.save_model(folder / "saved")
    loaded = type(model).from_pretrained(folder / "saved", dtype=torch.bfloat16, device_map=str(model.device))
    for name, value in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), value), name
    return f"{call.mode} ({call.mode_reason}), sampler {call.sampler}"


@torch.no_grad()
def _compare_logits(
    model: PreTrainedModel, shape: str, before: dict[str, Tensor], width: int, tokens: Tensor, found: Sequence[Tensor]
) -> None:
    """The logits of an enabled call's first row are those of the weights now, and not of those before training."""
    ours = torch.stack(list(found), 1)[0].float()
    stock = random_model(shape, model.device, torch.bfloat16)  # one more model at a time
    stock.load_state_dict(before, strict=False)
    old = _logits(stock, tokens, width)
    stock.load_state_dict(model.state_dict())
    plain = _logits(stock, tokens, width)
    exact = _logits(stock.float(), tokens, width)
    error, of_stock, of_old = ((part - exact).abs().max().item() for part in (ours, plain, old))
    print(f"largest error of logits: {error:.4f}, stock's {of_stock:.4f}, with the weights before {of_old:.4f}")
    assert error <= _ERROR_OF_STOCK * of_stock < of_old


def _logits(model: PreTrainedModel, tokens: Tensor, width: int) -> Tensor:
    return model(tokens[:, :-1]).logits[0, width - 1 :].float()


def _row(way: str, shape: str, rows: int, new_tokens: int, calls: Calls, ran: str, device: str) -> dict[str, Any]:
    first, *later = [call.seconds for call in calls.made]
    assert calls.paths == {_PATHS[way]}
    assert {call.rows for call in calls.made} == {rows}
    return provenance(device) | {
        "trl": version("trl"),
        "program": "TRL GRPO",
        "model": shape,
        "rows": rows,
        "prompt_tokens": calls.made[0].padded_length,
        "new_tokens": new_tokens,
        "way": way,
        "first_rollout_s": first,
        "rollout_s": sorted(later)[len(later) // 2],
        "extra_bytes": max(call.extra_bytes or 0 for call in calls.made),
        "prefilled_tokens": None if way == "continuous-batching" else calls.prefilled_tokens,
        "ran": ran,
    }


if __name__ == "__main__":
    typer.run(main)
