"""One call of `generate`: samples with their stop rules and log-probabilities."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ...api import enabled
from ...measurement.calls import Drawn, continuation, draw, end_tokens_of
from ..prompts import PromptFormat
from ..prompts.thoughts import ThoughtfulAnswer
from ..records import Sample, Task
from ..settings import Drawing
from .processed_log_probs import ProcessedLogProbs
from .row_stopping import RowStopping


def sharing(model: Any, drawing: Drawing) -> AbstractContextManager[Any]:
    """Within, calls of the model go the drawing's way."""
    if drawing.way == "stock":
        return nullcontext()
    return enabled(model, mode=drawing.mode, sampler=drawing.sampler)


@dataclass(frozen=True)
class DrawnRows:
    """What a call drew."""

    call: Drawn
    processed: Tensor | None  # [rows, steps] float32: log-probabilities after temperature and nucleus, if asked for
    finished_at: list[float]  # when each row finished, by `time.perf_counter`


def draw_rows(
    model: Any,
    tokenizer: Any,
    form: PromptFormat,
    tasks: Sequence[Task],
    count: int,
    drawing: Drawing,
    *,
    seed: int,
) -> DrawnRows:
    """Draw `count` samples of each task in one call, within `sharing`; torch's generators are left as they were."""
    texts = [form.prompt(task) for task in tasks]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=form.special_tokens, verbose=False)
    prompts = batch["input_ids"].repeat_interleave(count, dim=0)
    rules = [form.stop_rule(task) for task in tasks for _ in range(count)]
    stopping = RowStopping(tokenizer, rules, prompts, end_tokens_of(model), special=form.thinks)
    processed = ProcessedLogProbs(drawing.temperature, drawing.top_p) if drawing.processed else None
    call = draw(
        model,
        {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")},
        seed=seed,
        processors=[] if processed is None else [processed],
        time_every_step=True,
        max_new_tokens=drawing.max_new_tokens,
        num_return_sequences=count,
        stopping_criteria=[stopping],
        **drawing.options(),
    )
    return DrawnRows(
        call,
        None if processed is None else processed.of(call.tokens).cpu(),
        [call.ended if at is None else at for at in stopping.finished_at],
    )


def samples_of(
    drawn: DrawnRows, model: Any, tokenizer: Any, form: PromptFormat, tasks: Sequence[Task], *, first: int = 0
) -> list[Sample]:
    """The samples of a call, in row order: completions as the format cuts them, and log-probabilities of what is kept.

    The kept tokens are the fewest whose text holds the completion: an end token, and what a stop rule cuts off, do not
    count; thoughts do. `first` is the index of each task's first sample.
    """
    call = drawn.call
    count = len(call.tokens) // len(tasks)
    ends = set(end_tokens_of(model))
    samples = []
    for row, (prompt, tokens) in enumerate(zip(call.prompts.tolist(), call.tokens.tolist(), strict=True)):
        task = tasks[row // count]
        length = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
        text = continuation(tokenizer, prompt, tokens[:length], special=form.thinks)
        rule = form.stop_rule(task)
        tokens_of = partial(_tokens_of, tokenizer, prompt, tokens[:length], form.thinks)
        kept = tokens_of(rule.kept(text))
        answer = rule.answer_start(text) if isinstance(rule, ThoughtfulAnswer) else 0
        samples.append(
            Sample(
                task_id=task.task_id,
                index=first + row % count,
                completion=rule.completion(text),
                tokens=kept,
                sum_logp=_sum(call.log_probs, row, kept),
                sum_processed_logp=None if drawn.processed is None else _sum(drawn.processed, row, kept),
                thought_tokens=None if not form.thinks else kept if answer is None else tokens_of(answer),
            )
        )
    return samples


def _sum(log_probs: Tensor, row: int, kept: int) -> float:
    return float(log_probs[row, :kept].double().sum())


def _tokens_of(tokenizer: Any, prompt: list[int], tokens: list[int], special: bool, characters: int) -> int:
    """How many of the tokens make the first `characters` characters of text."""
    if not characters:
        return 0

    def text_length(count: int) -> int:
        return len(continuation(tokenizer, prompt, tokens[:count], special=special))

    return bisect.bisect_left(range(len(tokens) + 1), characters, key=text_length)
