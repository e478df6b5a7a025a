"""`hf-fastdecode generate`: completions of prompts, by any decoder-only model."""

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
    """What `generate` gave.

    Attributes:
        completions: The samples of the first prompt, then those of the next.
        seconds: Of the `generate` call, without loading the model.
        report: Which path ran and why; None for stock transformers.
    """

    completions: list[Completion]
    seconds: float
    report: Report | None


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    options: Mapping[str, str | bool] | None = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> Generated:
    """Draw completions with shared context, or with stock transformers.

    Args:
        model: From `load_model`; it is enabled for the call only.
        tokenizer: Its tokenizer.
        prompts: Texts; shorter ones are padded on the left.
        sampling: What to draw.
        stop: Strings that end a completion.
        options: Of `hf_fastdecode.enable`; None runs stock.
        on_step: Called at each step with the number of tokens drawn before it.
    """
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
