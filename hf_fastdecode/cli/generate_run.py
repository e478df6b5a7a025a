"""What `generate` runs: one call with shared context or without, and what is said about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_fastdecode.api import enabled, explain
from hf_fastdecode.generation.report import Report

from ..measurement.draw import end_tokens_of
from .completions import Completion, draw, encode, read_completions
from .memory import check_memory
from .sampling import Sampling


@dataclass(frozen=True)
class Generated:
    """Completions of a call."""

    completions: list[Completion]  # the samples of the first prompt, then those of the next
    seconds: float  # of the `generate` call, without loading the model
    report: Report | None  # which path ran and why; None for stock transformers


def run_generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    options: Mapping[str, str | bool] | None = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> Generated:
    """Draw completions with the model enabled with `options` for this call, or with stock transformers for None."""
    inputs = encode(model, tokenizer, prompts, sampling.max_new_tokens)
    check_memory(model, inputs["input_ids"], sampling, shared=options is not None)
    how: dict[str, Any] = {"stop": stop, "tokenizer": tokenizer, "on_step": on_step}
    if options is None:
        drawn, report = draw(model, inputs, sampling, **how), None
    else:
        with enabled(model, **options):
            drawn, report = draw(model, inputs, sampling, **how), explain(model)
    completions = read_completions(drawn, tokenizer, sampling, end_tokens=end_tokens_of(model), stop=stop)
    return Generated(completions, drawn.total_s, report)


def completion_heading(completion: Completion) -> str:
    """One line that stands before a completion's text."""
    return (
        f"--- prompt {completion.prompt}, sample {completion.sample}: {_count(completion.tokens, 'token')}, "
        f"mean log-p {completion.mean_logp:.3f}, ended by {completion.finish}"
    )


def summary(generated: Generated, *, machine: str, dtype: str) -> str:
    """One line about a `generate` call."""
    tokens = sum(completion.tokens for completion in generated.completions)
    call = generated.report.last_call if generated.report is not None else None
    path = "stock transformers, as asked" if call is None else f"{call.path} ({call.reason})"
    return (
        f"{_count(len(generated.completions), 'completion')}, {_count(tokens, 'token')} in {generated.seconds:.2f} s; "
        f"{path}; "
        f"{dtype}, {machine}"
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
