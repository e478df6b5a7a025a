"""Log-probabilities of given samples, by one pass over prompt and completion (teacher forcing)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..prompts import PromptFormat
from ..records import Sample
from ..task import Task


def rescored(
    model: Any,
    tokenizer: Any,
    form: PromptFormat,
    task: Task,
    samples: Sequence[Sample],
    *,
    rows: int = 16,
) -> list[Sample]:
    """The samples of a task with the model's own log-probabilities, also where another model or tool drew them.

    The completion is tokenized behind its prompt, so its tokens may be others than those that were drawn.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        form: Of the prompts.
        task: Of the samples.
        samples: With completions as they follow the prompt.
        rows: Samples that go through the model at once.
    """
    prompt = tokenizer(form.prompt(task), add_special_tokens=form.special_tokens, verbose=False).input_ids
    texts = [
        tokenizer(
            form.prompt(task) + sample.completion, add_special_tokens=form.special_tokens, verbose=False
        ).input_ids
        for sample in samples
    ]
    found: list[Sample] = []
    for start in range(0, len(samples), rows):
        part = texts[start : start + rows]
        longest = max(map(len, part))
        ids = torch.tensor([[*own, *[own[-1]] * (longest - len(own))] for own in part], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()  # [rows, longest - 1, vocabulary]
        log_probs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].double().cpu()
        for sample, own, row in zip(samples[start : start + rows], part, log_probs, strict=True):
            kept = _common_prefix(prompt, own)
            tokens = len(own) - kept
            found.append(replace(sample, tokens=tokens, sum_logp=float(row[kept - 1 : len(own) - 1].sum())))
    return found


def _common_prefix(prompt: Sequence[int], text: Sequence[int]) -> int:
    """Tokens at the beginning of both; the text's last prompt token may have merged with the completion."""
    return next((at for at, (one, other) in enumerate(zip(prompt, text)) if one != other), min(len(prompt), len(text)))
