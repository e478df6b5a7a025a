"""Drawing completions with `model.generate`: whether they fit into memory, their log-probabilities and texts."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from hf_fastdecode.api import enabled, explain
from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.generation.report import Report

from ..errors import InputError
from ..measurement import calls as measurement
from ..measurement.calls import Drawn, continuation, count_before_end, end_tokens_of, memory_and_logit_errors
from ..model_names import max_positions
from .console import bytes_text
from .options import Sampling

_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Completion:
    """One completion."""

    prompt: int  # its index
    sample: int  # its index among those of the prompt
    text: str  # without special tokens, up to the stop string if one ended it
    tokens: int  # drawn, with the one that ended it
    mean_logp: float  # natural log of the model's own probabilities: before temperature, top-p and top-k
    finish: str  # "stop" (an end token or a stop string), or "length"


def encode(model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` ``[prompts, length]`` on the model's device, padded on the left.

    An InputError for a prompt without tokens, with one that the model does not know, or without room for a completion.
    """
    # The error names a prompt that is too long, so the tokenizer need not warn of it.
    ids = [tokenizer(prompt, verbose=False).input_ids for prompt in prompts]
    limit = max_positions(model.config)
    for index, own in enumerate(ids):
        if not own:
            raise InputError(f"prompt {index} is empty; a completion needs at least one token to follow")
        if model.config.is_encoder_decoder:  # the prompt and the completion have positions of their own
            if limit is not None and max(len(own), max_new_tokens) > limit:
                raise InputError(
                    f"prompt {index} has {len(own)} tokens, its completion up to {max_new_tokens}, and this model has "
                    f"{limit} positions for each (max_position_embeddings); shorten the longer one"
                )
        elif limit is not None and len(own) + max_new_tokens > limit:
            raise InputError(
                f"prompt {index} has {len(own)} tokens, and with {max_new_tokens} new ones that is more than the "
                f"{limit} positions of this model (max_position_embeddings); shorten one of them"
            )
        if (last := max(own)) >= (vocabulary := vocabulary_of(model)):
            raise InputError(
                f"prompt {index} has token {last}, and the model knows tokens 0 to {vocabulary - 1}; its tokenizer "
                "is that of another model"
            )
    batch = tokenizer(list(prompts), padding=True, return_tensors="pt", verbose=False)
    return {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}


def draw(
    model: Any,
    inputs: Mapping[str, Tensor],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    tokenizer: Any = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> Drawn:
    """Draw samples of prompts from `encode`, and keep the cache.

    Stop strings need the tokenizer. `on_step` is called at each step with the number of tokens drawn before it. An
    InputError where rows do not fit into memory, or logits are not finite.
    """
    options: dict[str, Any] = {"do_sample": not sampling.greedy}
    if not sampling.greedy:
        options |= {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k")}
    if stop:
        options |= {"stop_strings": list(stop), "tokenizer": tokenizer}
    rows = len(inputs["input_ids"]) * sampling.n
    too_large = f"{_rows(rows, sampling)} do not fit in the memory of {model.device}; lower --n or --max-new-tokens"
    with memory_and_logit_errors(model, lambda: InputError(too_large)):
        return measurement.draw(
            model,
            inputs,
            seed=sampling.seed,
            on_step=on_step,
            keep_cache=True,
            max_new_tokens=sampling.max_new_tokens,
            num_return_sequences=sampling.n,
            **options,
        )


def read_completions(
    drawn: Drawn, tokenizer: Any, sampling: Sampling, *, end_tokens: Sequence[int], stop: Sequence[str] = ()
) -> list[Completion]:
    """The completions in row order: the samples of the first prompt, then those of the next."""
    completions = []
    for row, (prompt, ids) in enumerate(zip(drawn.prompts.tolist(), drawn.tokens.tolist(), strict=True)):
        length, finish = _length(tokenizer, ids, end_tokens, stop)
        text = continuation(tokenizer, prompt, ids[:length])
        cuts = [text.index(string) for string in stop if string in text]
        completions.append(
            Completion(
                prompt=row // sampling.n,
                sample=row % sampling.n,
                text=text[: min(cuts)] if cuts else text,
                tokens=length,
                mean_logp=drawn.log_probs[row, :length].double().mean().item(),
                finish=finish,
            )
        )
    return completions


def vocabulary_of(model: Any) -> int:
    """How many tokens the model has an embedding of."""
    return int(model.get_input_embeddings().weight.shape[0])


def _length(tokenizer: Any, ids: list[int], end_tokens: Sequence[int], stop: Sequence[str]) -> tuple[int, str]:
    """Tokens up to the one that ended the completion, and what that was; padding follows it."""
    length = count_before_end(ids, end_tokens)
    ended = length < len(ids)
    length += ended

    def stopped(tokens: int) -> bool:
        text = tokenizer.decode(ids[:tokens], clean_up_tokenization_spaces=False)
        return any(string in text for string in stop)

    if stop and stopped(length):
        return bisect.bisect_left(range(length), True, key=stopped), "stop"
    return length, "stop" if ended else "length"


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
        f"{path}; {dtype}, {machine}"
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def check_memory(model: Any, input_ids: Tensor, sampling: Sampling, *, shared: bool) -> None:
    """Refuse rows that the memory cannot hold.

    On a GPU only what the first step takes is counted, since rows that end early make room. On the CPU all keys and
    values count: there the system ends a process that takes too much, without an error. `input_ids` are
    ``[prompts, length]``; with `shared`, prompts are stored once.
    """
    prompts, length = input_ids.shape
    rows = prompts * sampling.n
    needed = rows * (8 * (length + sampling.max_new_tokens) + 4 * vocabulary_of(model))  # ids, and float32 logits
    if model.device.type == "cpu":
        needed += _kv_bytes(model, prompts, length, sampling, shared)
    if needed > (memory := _memory(model.device)):
        raise InputError(
            f"{_rows(rows, sampling)} need up to {bytes_text(needed)} of memory, {model.device} has "
            f"{bytes_text(memory)}; lower --n or --max-new-tokens"
        )


def _rows(rows: int, sampling: Sampling) -> str:
    return f"{rows:,} completion{'' if rows == 1 else 's'} of up to {sampling.max_new_tokens:,} tokens"


def _kv_bytes(model: Any, prompts: int, length: int, sampling: Sampling, shared: bool) -> int:
    try:
        shape = KVSizes.from_config(model.config)
    except ValueError:  # not a cache of keys and values alone
        return 0
    stored = shape.kv_bytes(sampling.n, length, sampling.max_new_tokens, model.dtype.itemsize)
    return prompts * (stored.shared if shared else stored.stock)


def _memory(device: torch.device) -> int:
    """Bytes that there are, used or not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):  # no such limit, or "max"
        return total
