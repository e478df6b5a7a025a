"""One call of `generate`: samples with their stop rules and log-probabilities."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_fastdecode.api import enabled
from hf_fastdecode.generation.decoding.token_log_probs import TokenLogProbs
from hf_fastdecode.measurement.continuations import continuation, end_tokens_of

from ..prompts import PromptFormat
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
    """What a call drew.

    Attributes:
        prompts: ``[rows, width]`` int64.
        tokens: ``[rows, steps]`` int64, padded behind each row's end.
        log_probs: ``[rows, steps]`` float32: of the tokens, by the raw logits.
        processed: Likewise, after temperature and nucleus; None unless asked for.
        started: When the call began, by `time.perf_counter`.
        step_times: When the logits of each token were there, likewise.
        finished_at: When each row finished, likewise.
    """

    prompts: Tensor
    tokens: Tensor
    log_probs: Tensor
    processed: Tensor | None
    started: float
    step_times: list[float]
    finished_at: list[float]


def draw_rows(
    model: Any,
    tokenizer: Any,
    form: PromptFormat,
    tasks: Sequence[Task],
    count: int,
    drawing: Drawing,
    *,
    seed: int,
    on_step: Callable[[int], None] = lambda drawn: None,
) -> DrawnRows:
    """Draw samples of some tasks in one call, from a seed; torch's generators are left as they were.

    Args:
        model: A causal language model, within `sharing` of the same drawing.
        tokenizer: Its tokenizer, padding on the left.
        form: Writes prompts, and says where samples end.
        tasks: Of the call.
        count: Samples of each.
        drawing: How to draw.
        seed: Of torch's generators.
        on_step: Called at each step with the number of tokens drawn before it.
    """
    device = model.device
    texts = [form.prompt(task) for task in tasks]
    batch = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=form.special_tokens, verbose=False)
    inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
    prompts = batch["input_ids"].repeat_interleave(count, dim=0)
    rules = [form.stop_rule(task) for task in tasks for _ in range(count)]
    stopping = RowStopping(tokenizer, rules, prompts, end_tokens_of(model))
    step_times: list[float] = []

    def step(drawn: int) -> None:
        step_times.append(_now(device))
        on_step(drawn)

    log_probs = TokenLogProbs(step)
    processed = ProcessedLogProbs(drawing.temperature, drawing.top_p) if drawing.processed else None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        started = _now(device)
        sequences = model.generate(
            **inputs,
            **drawing.options(),
            max_new_tokens=drawing.max_new_tokens,
            num_return_sequences=count,
            logits_processor=[log_probs, *([] if processed is None else [processed])],
            stopping_criteria=[stopping],
        )
        ended = _now(device)
    tokens = sequences[:, prompts.shape[1] :]
    return DrawnRows(
        prompts=prompts,
        tokens=tokens.cpu(),
        log_probs=log_probs.of(tokens).cpu(),
        processed=None if processed is None else processed.of(tokens).cpu(),
        started=started,
        step_times=step_times,
        finished_at=[ended if at is None else at for at in stopping.finished_at],
    )


def samples_of(
    drawn: DrawnRows, model: Any, tokenizer: Any, form: PromptFormat, tasks: Sequence[Task], *, first: int = 0
) -> list[Sample]:
    """The samples of a call, in row order: completions as the format cuts them, and log-probabilities of what is kept.

    The kept tokens are the fewest whose text holds the completion: an end token, and what a stop rule cuts off, do not
    count.

    Args:
        drawn: From `draw_rows`.
        model: That drew.
        tokenizer: Its tokenizer.
        form: Of the prompts.
        tasks: Of the call.
        first: Index of each task's first sample.
    """
    count = len(drawn.tokens) // len(tasks)
    ends = set(end_tokens_of(model))
    samples = []
    for row, (prompt, tokens) in enumerate(zip(drawn.prompts.tolist(), drawn.tokens.tolist(), strict=True)):
        task = tasks[row // count]
        length = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
        text = continuation(tokenizer, prompt, tokens[:length])
        rule = form.stop_rule(task)
        kept = _tokens_of(tokenizer, prompt, tokens[:length], rule.kept(text))
        samples.append(
            Sample(
                task_id=task.task_id,
                index=first + row % count,
                completion=rule.completion(text),
                tokens=kept,
                sum_logp=_sum(drawn.log_probs, row, kept),
                sum_processed_logp=None if drawn.processed is None else _sum(drawn.processed, row, kept),
            )
        )
    return samples


def _sum(log_probs: Tensor, row: int, kept: int) -> float:
    return float(log_probs[row, :kept].double().sum())


def _tokens_of(tokenizer: Any, prompt: list[int], tokens: list[int], characters: int) -> int:
    """How many tokens it takes for so many characters of text."""
    if not characters:
        return 0

    def text_length(count: int) -> int:
        return len(continuation(tokenizer, prompt, tokens[:count]))

    return bisect.bisect_left(range(len(tokens) + 1), characters, key=text_length)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
