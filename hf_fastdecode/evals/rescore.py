"""Log-probabilities of given samples, by one pass over prompt and completion (teacher forcing)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from tqdm import tqdm

from ..errors import InputError
from ..files import JsonlWriter, json_lines, read_jsonl, write_text
from ..generation.decoding.sampling import NotFiniteError
from ..measurement.calls import memory_and_logit_errors
from .prompts import PromptFormat
from .records import Sample, Task

_WORD: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS_AT_ONCE: Final = 1 << 24
_NOT_THE_MODELS: Final = ("_name_or_path", "transformers_version")  # where a config lies, and who wrote it
_SPREAD: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # golden ratio: neighbouring words get very different factors


def model_digest(model: Any, tokenizer: Any) -> str:
    """A hash of weights, configs and tokenizer: of what decides the tokens that are drawn, and their text."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_THE_MODELS}
    parts = [config, model.generation_config.to_diff_dict(), tokenizer_text(tokenizer)]
    text = json.dumps([weights_digest(model), *parts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tokenizer_text(tokenizer: Any) -> str:
    """All that decides what tokens a text has: the Rust tokenizer, or without one the files that it is saved as."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.to_str())
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes().decode("latin-1") for path in sorted(Path(folder).iterdir())}
    return json.dumps([type(tokenizer).__name__, files])


def weights_digest(model: Any) -> str:
    """A hash of names, shapes, dtypes and every value of a model's state dict, computed where the weights are."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        for tensor in _plain(value):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sum_of_bits(tensor)}".encode())
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Iterator[Tensor]:
    """The tensors that a value of a state dict consists of: several for a quantised one."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _plain(getattr(value, name))
    elif isinstance(value, Tensor) and not value.is_meta:
        yield value.detach()


def _sum_of_bits(tensor: Tensor) -> int:
    """A sum over a tensor's words, each weighted by its position; it wraps around at 64 bits."""
    words = tensor.contiguous().reshape(-1).view(_WORD[tensor.dtype.itemsize])
    total = 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE].long()
        factors = torch.arange(start, start + len(part), device=part.device) * _SPREAD | 1  # odd: no bit is lost
        total += int((part * factors).sum())
    return total & (1 << 64) - 1


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

    The completion is tokenized after its prompt, so its tokens may differ from those that were drawn. At most `rows`
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
    """``[texts, longest - 1]`` float64 on the CPU: log-probabilities of all tokens but the first."""
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
