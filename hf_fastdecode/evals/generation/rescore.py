"""Log-probabilities of given samples, by one pass over prompt and completion (teacher forcing)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from tqdm import tqdm

from hf_fastdecode.generation.decoding.token_log_probs import NotFiniteError

from ...errors import InputError
from ...files import JsonlWriter, json_lines, read_jsonl, write_text
from ...measurement.calls import memory_and_logit_errors
from ..prompts import PromptFormat
from ..records import Sample, Task
from .weights import model_digest

_LOGITS: Final = 1 << 28  # numbers, half a GiB in bfloat16


def rescore_samples(
    model: Any,
    tokenizer: Any,
    form: PromptFormat,
    tasks: Sequence[Task],
    samples: Sequence[Sample],
    out: Path,
) -> None:
    """Write samples with the model's own log-probabilities, see `rescored`.

    Finished tasks are kept in a hidden file beside `out`, from which an interrupted call continues.
    """
    if form.thinks:
        raise InputError("samples hold no thoughts, so a model that thinks cannot score them; leave out `chat`")
    content = [model_digest(model, tokenizer), *map(form.prompt, tasks), *map(repr, samples)]
    head = {"rescored": hashlib.sha256("\0".join(content).encode(errors="surrogatepass")).hexdigest()[:16]}
    journal = out.with_name(f".{out.name}.rescored")
    lines = list(read_jsonl(journal)) if journal.exists() else []
    if lines[:1] != [head]:
        lines = []
        journal.unlink(missing_ok=True)
    kept = {(line["task_id"], line["index"]): line for line in lines[1:]}
    with JsonlWriter(journal) as file:
        if not lines:
            file.write([head])
        for task in tqdm(tasks, desc="rescore", unit="task", disable=None):
            own = [sample for sample in samples if sample.task_id == task.task_id]
            if all((sample.task_id, sample.index) in kept for sample in own):
                continue
            found = rescored(model, tokenizer, form, task, own)
            file.write(found)
            kept |= {(sample.task_id, sample.index): asdict(sample) for sample in found}
    write_text(out, json_lines(kept.values()))
    journal.unlink()


def rescored(
    model: Any, tokenizer: Any, form: PromptFormat, task: Task, samples: Sequence[Sample], *, rows: int = 16
) -> list[Sample]:
    """A task's samples with the model's own log-probabilities, whichever model or tool drew them.

    The completion is tokenized behind its prompt, so its tokens may differ from those that were drawn. At most `rows`
    samples go through the model at once; fewer if they are long, because logits are large.
    """
    prompt = _tokens(tokenizer, form, form.prompt(task))
    texts = [_tokens(tokenizer, form, form.prompt(task) + sample.completion) for sample in samples]
    vocabulary = model.get_output_embeddings().weight.shape[0]
    at_once = max(1, min(rows, _LOGITS // (vocabulary * max(map(len, texts), default=1))))
    found: list[Sample] = []
    for start in range(0, len(samples), at_once):
        part = texts[start : start + at_once]
        with memory_and_logit_errors(
            model,
            lambda: InputError(
                'the logits of a sample do not fit into memory; try `dtype="bfloat16"` or `device="cpu"`'
            ),
        ):
            log_probs = _log_probs(model, part)
        for sample, own, row in zip(samples[start : start + at_once], part, log_probs, strict=True):
            first = max(1, _common_prefix(prompt, own))  # the first token has no logits
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
