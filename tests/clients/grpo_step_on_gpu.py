"""Whole steps of GRPO by TRL's trainer, in parts: ``python -m tests.clients.grpo_step_on_gpu --out FILE``.

A model of the named shape with random weights in bf16 trains for some steps: stock, enabled with
`share_forward=False`, and enabled. Every rollout serves two steps (`num_iterations=2`), so that TRL computes the
log-probabilities of the completions after it, before the first update. A row has the seconds of such a step: of its
rollout, of these log-probabilities, and of all else, which is forward, backward, rewards and the optimizer. Other ways
have rollouts that return log-probabilities, and their rows say how these agree with TRL's: the tokens by the ratio of
the two, the share of tokens with the same bits, and the largest difference. Small models do on a CPU:
``--device cpu --shape tiny-qwen3 --precision fp32``. Rows of other cases that FILE has are kept.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

import hf_fastdecode as fd
from benchmarks.generate.quantized import quantize
from hf_fastdecode.files import read_rows, write_rows
from hf_fastdecode.measurement.calls import idle_time
from hf_fastdecode.measurement.rows import provenance
from hf_fastdecode.measurement.shapes import random_model

from ..tiny_models import ARCHITECTURES, tiny_model_of_type
from .recording import recorded
from .training import base_of, make_trainer, rollout_of_page


class _Way(NamedTuple):
    """How rollouts are made.

    Attributes:
        enable: The options of `enable`; None for stock.
        rollout: Makes the rollout function; None for TRL's own rollouts. Raw log-probabilities of steps are comparable
            at a temperature of 1.
        replayed: Whether updates route as the rollouts did.
    """

    enable: dict[str, Any] | None
    rollout: Callable[[], Any] | None = None
    replayed: bool = False


_of_steps = partial(rollout_of_page, steps=True)
_WAYS = {
    "stock": _Way(None),
    "rollouts": _Way({"share_forward": False}),
    "enabled": _Way({}),
    "log-probs of steps": _Way({}, _of_steps),
    "log-probs of trainer": _Way({"log_probs": "trainer"}, rollout_of_page),
    "log-probs of steps, replayed": _Way({}, _of_steps, replayed=True),
    "log-probs of trainer, replayed": _Way({"log_probs": "trainer"}, rollout_of_page, replayed=True),
}

_BY_NAME = 2
"""So many ways, the last ones, run only where they are named: they are of experts."""

_TINY = {
    "tiny-qwen3": ("qwen3", ARCHITECTURES["qwen3"][1]),
    "tiny-qwen3-moe": (
        "qwen3_moe",
        ARCHITECTURES["qwen3"][1] | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "tiny-gpt-oss": ARCHITECTURES["gpt_oss"],
}

_PRECISIONS = ("bf16", "bf16 autocast", "fp32")
"""Of weights and products; under autocast weights are fp32."""

_QUANTIZED = {"LoRA over torchao int8": "ao-int8", "LoRA over bitsandbytes NF4": "bnb-4bit"}
_WEIGHTS = ("all", "LoRA", "LoRA, merged in rollouts", *_QUANTIZED)
"""What is trained, over what."""

_EDGES = [10 ** (half / 2) for half in range(-14, 1)]  # 1e-7 to 1
_BINS = [*(-edge for edge in reversed(_EDGES)), 0.0, 1e-30, *_EDGES]
"""Where bins of (ratio - 1) begin, each of which ends where the next begins; that of 0 has equal bits alone."""

_PARTS = ("step_s", "rollout_s", "logprobs_s", "update_s")
_SHOWN = ("way", *_PARTS, "first_step_s", "peak_bytes", "tokens", "same_bits", "largest_difference", "ran")


class _Steps(TrainerCallback):
    """Seconds of each step of the optimizer, and of what TRL scores without gradients in it."""

    def __init__(self, trainer: Any):
        self.device, self.seconds, self.scored = trainer.model.device, [], []
        self.differences: list[Tensor] = []  # TRL's log-probabilities minus rollouts'
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
            difference = found["old_per_token_logps"].double() - drawn
            self.differences.append(difference[found["completion_mask"] > 0])
        return found


def main(
    out: Annotated[Path, typer.Option(help="CSV file of rows to write.")],
    way: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(_WAYS)}.")] = None,
    shape: Annotated[
        str, typer.Option(help=f"A shape of `benchmarks generate`, {', '.join(_TINY)}; `embedded` in fp32.")
    ] = "qwen3-4b",
    precision: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(_PRECISIONS)}.")] = None,
    weights: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {'; '.join(_WEIGHTS)}.")] = None,
    samples: Annotated[int, typer.Option(help="Completions of each prompt.")] = 16,
    prompts: Annotated[int, typer.Option(help="Prompts in a rollout.")] = 4,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a completion.")] = 256,
    shots: Annotated[int, typer.Option(help="Solved examples in front of each prompt.")] = 6,
    passes: Annotated[int, typer.Option(help="Passes of an update; TRL shuffles the rows between them.")] = 1,
    rollouts: Annotated[int, typer.Option(help="Rollouts, the first of which is not counted.", min=2)] = 2,
    device: Annotated[str, typer.Option(help="Where to train.")] = "cuda",
) -> None:
    """Train in each way, and write each row when it is measured."""
    rows = read_rows(out) if out.exists() else []
    sizes = {"max_completion_length": new_tokens, "num_generations": samples, "max_steps": 2 * rollouts}
    sizes |= {"per_device_train_batch_size": samples * prompts // passes, "gradient_accumulation_steps": passes}
    for number, kind, name in product(
        precision or _PRECISIONS[:1], weights or _WEIGHTS[:1], way or list(_WAYS)[:-_BY_NAME]
    ):
        given = _WAYS[name]
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # of the case before, which fp32 would run in
        with tempfile.TemporaryDirectory() as folder:
            options = {"shots": shots, "use_cpu": device == "cpu", "num_iterations": 2, "bf16": number != "fp32"}
            options |= sizes | ({"generation_kwargs": {"output_router_choices": True}} if given.replayed else {})
            trainer = _trainer(Path(folder), kind, partial(_model, shape, device, number), options)
            if given.enable is not None:
                fd.enable(trainer.model, min_saved_tokens=1, **given.enable)  # also of few and tiny ones, on a CPU
            if given.rollout is not None:
                rollout = given.rollout()
                trainer.rollout_func = _merged(rollout) if "merged" in kind else rollout
            case = {"model": shape, "precision": number, "weights": kind, "way": name}
            row = provenance(device) | {"trl": version("trl"), "program": "TRL GRPO step", **case}
            row |= {"rows": samples * prompts, "new_tokens": new_tokens, "passes": passes}
            row |= _trained(
                trainer, samples * prompts, shared=given.enable is not None, forward=name not in ("stock", "rollouts")
            )
        rows = [*(one for one in rows if any(one.get(column) != value for column, value in case.items())), row]
        write_rows(out, rows)
        print({column: row[column] for column in _SHOWN}, flush=True)
        del trainer, options
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _model(shape: str, device: str, precision: str) -> PreTrainedModel | None:
    """A model with random weights; None for the embedded one."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if shape in _TINY:
        model_type, fields = _TINY[shape]
        fields = fields | {"max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": 1}
        vocabulary = len(fd.load_embedded()[1])
        return tiny_model_of_type(model_type, vocab_size=vocabulary, **fields).to(device, dtype)
    return None if shape == "embedded" else random_model(shape, device, dtype)


def _trainer(
    folder: Path, weights: str, make_model: Callable[[], PreTrainedModel | None], options: dict[str, Any]
) -> Any:
    """A trainer of what `weights` names."""
    model, adapter = make_model(), None
    if weights.startswith("LoRA"):
        from peft import LoraConfig

        # A mixture's experts are parameters of one module, without projections of their own.
        targets = ["q_proj", "o_proj" if "experts" in str(model) else "up_proj"]
        adapter = LoraConfig(target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    if hasattr(getattr(model, "config", None), "output_router_logits"):  # with its loss updates run stock
        options |= {"router_aux_loss_coef": 0.0}
    if how := _QUANTIZED.get(weights):
        quantize(model, how)  # but for the head, by slices of whose weight TRL multiplies
    return make_trainer("grpo", folder, model=model, peft_config=adapter, **options)


def _merged(rollout: Callable[..., Any]) -> Callable[..., Any]:
    """A rollout function whose adapter is merged into the weights while it draws."""

    def drawn(prompts: list[str], trainer: Any) -> Any:
        trainer.model.merge_adapter()
        try:
            return rollout(prompts, trainer)
        finally:
            trainer.model.unmerge_adapter()

    return drawn


def _trained(trainer: Any, rows: int, *, shared: bool, forward: bool) -> dict[str, Any]:
    """The measured columns of a run of a trainer."""
    model, cuda = trainer.model, trainer.model.device.type == "cuda"
    with recorded(base_of(model)) as calls:
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
    """How log-probabilities of rollouts agree with TRL's, and tokens by their ratio; None where they return none."""
    if not differences:
        return dict.fromkeys(("tokens", "same_bits", "largest_difference", "outside"))
    found = torch.cat(differences).cpu()
    above = found.expm1()
    at = torch.bucketize(above, torch.tensor(_BINS, dtype=torch.float64), right=True) - 1
    counts = at.bincount(minlength=len(_BINS)).tolist()
    return {
        "tokens": len(found),
        "same_bits": (found == 0).double().mean().item(),
        "largest_difference": found.abs().max().item(),
        "outside": (above.abs() > 0.1).double().mean().item(),
        **{f"from {edge:.3g}": count for edge, count in zip(_BINS, counts, strict=True)},
    }


if __name__ == "__main__":
    typer.run(main)
