"""Measured programs that call `generate`, and vLLM beside it, as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from hf_fastdecode.measurement.rows import Measurement, by, markdown

from .generate.cases import PromptTree
from .generate.table import cases_of, model_type_of, timed, where_measured
from .page_tables import cell

_LEAST_FACTOR: Final = 1.2  # of one run each; less cannot be told from noise
_VLLM_WAYS: Final = {
    "stock": "transformers",
    "vllm": "vLLM",
    "vllm-cascade": "with cascade",
    "shared": "`enable(model)`",
}

_FAMILIES: Final = {
    "qwen3_5_text": "layers with states",
    "nemotron_h": "layers with states",
    "deepseek_v2": "latents, experts",
    "qwen3_moe": "experts",
    "gpt_oss": "experts, windows",
    "qwen3_vl": "an image",
    "gemma3": "an image, windows",
}
"""What a model has beside plain attention."""

_ROLLOUT_WAYS: Final = {
    "stock": "stock `generate`",
    "continuous-batching": "`use_transformers_continuous_batching`",
    "enabled": "`fd.enable(trainer.model)`",
}


CLIENTS: Final[dict[str, tuple[Callable[[Measurement], bool], str]]] = {
    "evaluation": (lambda row: row["program"] in ("lm-eval", "evalplus", "pipeline"), "samples"),
    "programs": (lambda row: row["model"] == "embedded", "results"),
    "scoring": (lambda _: True, "scores"),
}
"""By the name of a table: its rows, and what is the same where their status is ok."""


def clients_table(rows: Sequence[Measurement], *, name: str) -> str:
    """Seconds in `generate` and tokens prefilled, stock → enabled, of the rows of one of `CLIENTS`."""
    chosen, same = CLIENTS[name]
    rows, lines = [row for row in rows if chosen(row)], []
    for ways in by(rows, "program", "model", "setting"):
        stock, enabled = ways["stock"], ways["enabled"]
        before, now = (float(row["generate_s"]) for row in (stock, enabled))
        gain = f"{before / now:.1f}x" if before / now >= _LEAST_FACTOR else "none"
        cells = [*(stock[name] for name in ("program", "model", "setting")), f"{before:.1f} → {now:.1f} ({gain})"]
        cells.append(" → ".join(f"{int(row['prefilled_tokens']):,}" for row in (stock, enabled)))
        lines.append([*cells, "yes" if enabled["status"] == "ok" else enabled["status"]])
    names = ["program", "model", "setting", "seconds in generate", "tokens prefilled", f"same {same}"]
    if name == "scoring":
        names[3:5] = "seconds in forward passes", "tokens computed"
    note = f"{_where(rows[0])}; stock → enabled; medians where a case was run more than once."
    return markdown(names, lines, note)


def rollouts_table(rows: Sequence[Measurement]) -> str:
    """Rollouts on a GPU, a line for each way: the first one compiles kernels and captures steps, the others do not."""
    stock = next(row for row in rows if row["way"] == "stock")
    lines = []
    for row in rows:
        seconds = [f"{float(row[name]):.1f} s" for name in ("first_rollout_s", "rollout_s")]
        memory = f"{float(row['extra_bytes']) / 2**30:.1f} GiB" if row.get("extra_bytes") else "not measured"
        prefilled = f"{int(row['prefilled_tokens']):,}" if row["prefilled_tokens"] else "not known"
        lines.append([_ROLLOUT_WAYS[row["way"]], *seconds, memory, prefilled, row["ran"]])
    what = f"{stock['rows']} completions of {stock['new_tokens']} tokens, prompts of up to {stock['prompt_tokens']}"
    names = ["rollouts", "the first", "later ones", "memory over training's", "tokens prefilled", "what ran"]
    trl = f" (TRL {stock['trl']})" if "trl" in stock else ""
    program = f"{stock['program']}{trl}, {stock['model']} in bf16"
    note = f"{program}, a rollout: {what}; tokens prefilled: in all rollouts; {_where(stock)}."
    return markdown(names, lines, note)


def divided_rollouts_table(rows: Sequence[Measurement]) -> str:
    """Rollouts of a model on several GPUs, a line for each shape and way of dividing it."""
    ways = {
        "stock": "FSDP 2, stock",
        "ddp": "DistributedDataParallel",
        "gathered": "FSDP 2",
        "zero3": "ZeRO-3, `ds3_gather_for_generation=False`",
        "zero3-gathered": "ZeRO-3, TRL gathers",
        "zero3-stock": "ZeRO-3, stock",
    }
    lines = []
    for row in rows:
        seconds = [f"{float(row[name]):.2f} s" for name in ("first_s", "rollout_s")]
        size = float(row["gathered_bytes"] or 0) / 2**30
        gathered = f"{size:.1f} GiB in {1e3 * float(row['gather_s']):.0f} ms" if size else ""
        sizes = [f"{float(row['most_bytes']) / 2**30:.1f} GiB", gathered]
        lines.append([row["shape"], ways[row["way"]], *seconds, *sizes, row["captures"] or "none"])
    first = rows[0]
    note = f"{first['ranks']} processes, each {first['rows']} completions of 256 tokens of 4 prompts of 1,000; bf16; "
    note += f"memory: the most of a GPU; captures: in all rollouts; {_where(first)}."
    return markdown(["model", "", "the first", "later ones", "memory", "gathered", "captures"], lines, note)


def grpo_steps_table(rows: Sequence[Measurement]) -> str:
    """Seconds of a whole training step with a rollout, and of its parts, a line for each way."""
    ways = {
        "stock": "stock",
        "rollouts": "`fd.enable(model, share_forward=False)`",
        "enabled": "`fd.enable(model)`",
        "log-probs of steps": "the same, rollouts return log-probabilities of steps",
        "log-probs of trainer": 'the same with `log_probs="trainer"`',
    }
    lines = []
    for row in rows:
        seconds = [f"{float(row[name]):.2f} s" for name in ("step_s", "rollout_s", "logprobs_s", "update_s")]
        lines.append([ways[row["way"]], *seconds, f"{float(row['peak_bytes']) / 2**30:.0f} GiB", row["ran"]])
    first = rows[0]
    what = f"{first['rows']} completions of {first['new_tokens']} tokens, prompts of up to {first['prompt_tokens']}"
    note = f"{first['program']} (TRL {first['trl']}), {first['model']} in bf16: {what}; {_where(first)}."
    names = ["", "a step", "rollout", "log-probabilities", "update and all else", "peak memory", "of the last pass"]
    return markdown(names, lines, note)


def grpo_steps_in_brief(rows: Sequence[Measurement]) -> str:
    """A sentence: a whole step and its parts, stock → enabled."""
    ways = {row["way"]: row for row in rows}
    step, *parts = (
        " → ".join(f"{float(ways[way][name]):.1f}" for way in ("stock", "enabled"))
        for name in ("step_s", "rollout_s", "logprobs_s", "update_s")
    )
    first = rows[0]
    what = (
        f"A whole step of TRL's GRPOTrainer ({first['rows']} completions of {first['new_tokens']} tokens, prompts of "
    )
    what += f"up to {first['prompt_tokens']}, {first['model']}'s shape, {first['device']}), stock → enabled"
    named = zip(("rollout", "log-probabilities", "update and all else"), parts, strict=True)
    return f"{what}: **{step} s**; {', '.join(f'{name} {seconds}' for name, seconds in named)}."


def _where(row: Measurement) -> str:
    return f"{row['device']}, torch {row['torch']}, transformers {row['transformers']}"


def vllm_table(rows: Sequence[Measurement]) -> str:
    """One line for each case: the call and, in parentheses, a step of each way; the first token, vLLM's → ours."""
    lines = []
    for ways in cases_of(rows):
        first = next(iter(ways.values()))
        tree = PromptTree.of_row(first["shape"])
        prompts = 1 if tree is None else tree.problems
        cells = [first["shape"].partition(" ")[0], f"{prompts} of {int(first['context']):,}"]
        cells.append(str(int(first["samples"]) // prompts))
        cells += [
            cell(ways.get(way), lambda row: f"{float(row['total_s']):.2f} s ({float(row['ms_per_step']):.1f} ms)")
            for way in _VLLM_WAYS
        ]
        lines.append([*cells, " → ".join(f"{float(ways[way]['prefill_s']):.3f} s" for way in ("vllm", "shared"))])
    ours, theirs = (next(row for row in rows if row["way"] == way) for way in ("shared", "vllm"))
    where = f"{where_measured([ours])}, {theirs['ran'].partition(',')[0]}, {ours['new_tokens']} new tokens"
    names = ["model", "prompts", "n", *_VLLM_WAYS.values(), "first token, vLLM → `enable(model)`"]
    return markdown(names, lines, f"{where}; a call (a step); empty: not measured; {timed(rows)}.")


def family_of(row: Measurement) -> str:
    """What a model has beside plain attention; empty where it has that alone."""
    return _FAMILIES.get(str(model_type_of(row)), "")


def beside_vllm(rows: Sequence[Measurement]) -> list[Measurement]:
    """vLLM's and ours of the cases that both ran, in turn, of models with more than plain attention."""
    cases = cases_of([row for row in rows if family_of(row)])
    pairs = ([ways.get(way, {}) for way in ("vllm", "shared")] for ways in cases)
    return [row for pair in pairs if all(one.get("status") == "ok" for one in pair) for row in pair]


def runs_behind(theirs: Measurement | None, ours: Measurement, column: str = "total_s") -> bool:
    """Whether both ran, and ours took longer."""
    if theirs is None or not theirs["status"] == ours["status"] == "ok":
        return False
    return float(ours[column]) > float(theirs[column])


def families_table(rows: Sequence[Measurement]) -> str:
    """A line for each case of `beside_vllm`: first token and whole call of both; ours is bold where it is behind."""
    if not rows:
        return "Not measured beside vLLM.\n"
    lines = []
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        tree = PromptTree.of_row(ours["shape"])
        prompts = 1 if tree is None else tree.problems
        cells = [ours["shape"].partition(" ")[0], family_of(ours), f"{prompts} of {int(ours['context']):,}"]
        cells += [str(int(ours["samples"]) // prompts), f"{int(ours['new_tokens']):,}"]
        for name in ("prefill_s", "total_s"):
            seconds = [float(row[name]) for row in (theirs, ours)]
            shown = [f"{one:.2f}" if one >= 1 else f"{one:.3f}" for one in seconds]
            cells.append(f"{shown[0]} → " + (f"**{shown[1]}**" if runs_behind(theirs, ours, name) else shown[1]))
        lines.append(cells)
    names = ["model", "it has", "prompts", "n", "new tokens", "first token, s", "whole call, s"]
    engine = rows[0]["ran"].partition(",")[0]
    note = f"{where_measured(rows[1:])}; {engine} → `enable(model)`, bold: behind; {timed(rows)}."
    return markdown(names, lines, note)
