"""Log-probabilities of given samples, by one pass over prompt and completion (teacher forcing)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from hf_fastdecode.generation.token_log_probs import NotFiniteError

from ...command_errors import CommandError
from ...drawing_errors import told
from ..prompts import PromptFormat
from ..records import Sample
from ..task import Task

_LOGITS: Final = 1 << 28  # numbers, half a GiB in bfloat16


def rescored(
    model: Any, tokenizer: Any, form: PromptFormat, task: Task, samples: Sequence[Sample], *, rows: int = 16
) -> list[Sample]:
    """The samples of a task with the model's own log-probabilities, also where another model or tool drew them.

    The completion is tokenized behind its prompt, so its tokens may be others than those that were drawn.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        form: Of the prompts.
        task: Of the samples.
        samples: With completions as they follow the prompt.
        rows: Most samples that go through the model at once; long ones, whose logits are large, are fewer.

    Raises:
        CommandError: The model's logits are not finite, or those of one sample do not fit into memory.
    """
    prompt = _tokens(tokenizer, form, form.prompt(task))
    texts = [_tokens(tokenizer, form, form.prompt(task) + sample.completion) for sample in samples]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    at_once = max(1, min(rows, _LOGITS // (vocabulary * max(map(len, texts), default=1))))
    found: list[Sample] = []
    for start in range(0, len(samples), at_once):
        part = texts[start : start + at_once]
        with told(
            model,
            lambda: CommandError(
                "the logits of a sample do not fit into memory; try --dtype bfloat16 or --device cpu"
            ),
        ):
            log_probs = _log_probs(model, part)
        for sample, own, row in zip(samples[start : start + at_once], part, log_probs, strict=True):
            first = max(1, _common_prefix(prompt, own))  # nothing stands before the first token to tell it by
            sum_logp = float(row[first - 1 : len(own) - 1].sum())
            found.append(replace(sample, tokens=len(own) - first, sum_logp=sum_logp, sum_processed_logp=None))
    return found


def _tokens(tokenizer: Any, form: PromptFormat, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=form.special_tokens, verbose=False).input_ids)


@torch.no_grad()
def _log_probs(model: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """``[texts, longest - 1]`` float64 on the CPU: of each token but the first, behind those before it."""
    longest = max(map(len, texts))
    ids = torch.tensor([[*own, *[own[-1]] * (longest - len(own))] for own in texts], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    drawn = [own.float().log_softmax(-1).gather(1, after[1:, None])[:, 0] for own, after in zip(logits, ids)]
    log_probs = torch.stack(drawn).double().cpu()
    if bool(log_probs.isnan().any()):
        raise NotFiniteError
    return log_probs


def _common_prefix(prompt: Sequence[int], text: Sequence[int]) -> int:
    """Tokens at the beginning of both; the text's last prompt token may have merged with the completion."""
    return next((at for at, (one, other) in enumerate(zip(prompt, text)) if one != other), min(len(prompt), len(text)))
