"""Models of the command line: loaded by name, and completions drawn with them, if they fit into memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_fastdecode.api import enabled, explain
from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.generation.report import Report

from ..dtypes import parse_dtype
from ..errors import InputError, out_of_memory
from ..evals.report import plural
from ..measurement import calls as measurement
from ..measurement.calls import (
    Drawn,
    continuation,
    count_before_end,
    cpu_memory,
    end_tokens_of,
    memory_and_logit_errors,
)
from ..measurement.shapes import SHAPES, random_model
from ..model_loading import load_tokenizer, load_weights, takes_text_only
from ..model_names import EMBEDDED, SHAPE, load_config, max_positions
from .console import bytes_text
from .options import Sampling


def load_model(name: str, dtype: str, device: torch.device, *, encoders: bool = False) -> tuple[Any, Any]:
    """A model that generates text, in eval mode, and its tokenizer, which pads where the model does not look.

    Sampling defaults that come with a checkpoint are dropped, its special tokens kept: what `generate` does is what
    the command line says. Names are those of `load_config`, but not a config.json; or ``shape:`` and one of `SHAPES`:
    random weights, which are as fast as trained ones, and the embedded tokenizer. The dtype ``auto`` is float32 for
    the embedded model, for a shape bfloat16 on a GPU and float32 elsewhere, what the checkpoint says for others.
    Encoder-decoders are refused unless `encoders`.
    """
    dtype = parse_dtype(dtype)
    if name.startswith(SHAPE):
        return _random_model(name.removeprefix(SHAPE), dtype, device)
    config = load_config(name)
    if config.is_encoder_decoder and not encoders:
        raise InputError(
            f"{name} is an encoder-decoder ({config.model_type}), and this command takes decoder-only models; "
            "`hf-fastdecode generate` and `inspect` take others too"
        )
    if config.is_encoder_decoder and not takes_text_only(config):
        raise InputError(f"{name} ({config.model_type}) is given audio, and a prompt is a text; name a model of texts")
    tokenizer = load_tokenizer(name)
    model = load_weights(name, dtype, device)
    _prepare(model, tokenizer)
    return model, tokenizer


def _random_model(shape: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    chosen = ("bfloat16" if device.type == "cuda" else "float32") if dtype == "auto" else dtype
    tokenizer = load_tokenizer(EMBEDDED)
    if len(tokenizer) > SHAPES[shape]["vocab_size"]:
        raise InputError(
            f"shape {shape} has {SHAPES[shape]['vocab_size']} tokens, fewer than the {len(tokenizer)} of the embedded "
            "tokenizer; choose another"
        )
    try:
        return random_model(shape, device, getattr(torch, chosen)), tokenizer
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise InputError(f"shape {shape} does not fit in the memory of {device}; name a smaller one") from error


def _prepare(model: Any, tokenizer: Any) -> None:
    """Padding, on the left of a decoder's prompts, and a generation config of special tokens only."""
    encodes = model.config.is_encoder_decoder
    tokenizer.padding_side = "right" if encodes else "left"  # positions of an encoder may be counted from the left
    given = model.generation_config
    end = given.eos_token_id if given.eos_token_id is not None else tokenizer.eos_token_id
    # Which token pads does not matter, padding is masked; but it must be one of the model's.
    vocabulary = vocabulary_of(model)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= vocabulary:
        first = end[0] if isinstance(end, list) else end
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(first if first is not None and first < vocabulary else 0)
    kept = ("bos_token_id", *(("decoder_start_token_id", "forced_bos_token_id") if encodes else ()))
    model.generation_config = GenerationConfig(
        eos_token_id=end, pad_token_id=tokenizer.pad_token_id, **{name: getattr(given, name) for name in kept}
    )


@dataclass(frozen=True)
class Completion:
    prompt: int  # its index
    sample: int  # its index among those of the prompt
    text: str  # without special tokens, up to the stop string if one ended it
    tokens: int  # drawn, with the one that ended it
    mean_logp: float  # natural log of the model's probabilities: before temperature, top-p and top-k
    finish: str  # "stop" (an end token or a stop string), or "length"


def encode(model: Any, tokenizer: Any, prompts: Sequence[str], max_new_tokens: int) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` ``[prompts, length]`` on the model's device, padded on the left.

    An InputError for a prompt without tokens, with an unknown one, or with no positions left for a completion.
    """
    # The error names a prompt that is too long, so the tokenizer need not warn of it.
    ids = [tokenizer(prompt, verbose=False).input_ids for prompt in prompts]
    limit = max_positions(model.config)
    for index, one in enumerate(ids):
        if not one:
            raise InputError(f"prompt {index} is empty; a completion needs at least one token to follow")
        if model.config.is_encoder_decoder:  # the positions of prompt and completion are counted separately
            if limit is not None and max(len(one), max_new_tokens) > limit:
                raise InputError(
                    f"prompt {index} has {len(one)} tokens, its completion up to {max_new_tokens}, and this model has "
                    f"{limit} positions for each (max_position_embeddings); shorten the longer one"
                )
        elif limit is not None and len(one) + max_new_tokens > limit:
            raise InputError(
                f"prompt {index} has {len(one)} tokens, and with {max_new_tokens} new ones that is more than the "
                f"{limit} positions of this model (max_position_embeddings); shorten one of them"
            )
        if (last := max(one)) >= (vocabulary := vocabulary_of(model)):
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
    return (
        f"--- prompt {completion.prompt}, sample {completion.sample}: {plural(completion.tokens, 'token')}, "
        f"mean log-p {completion.mean_logp:.3f}, ended by {completion.finish}"
    )


def summary(generated: Generated, *, machine: str, dtype: str) -> str:
    tokens = sum(completion.tokens for completion in generated.completions)
    call = generated.report.last_call if generated.report is not None else None
    path = "stock transformers, as asked" if call is None else f"{call.path} ({call.reason})"
    return (
        f"{plural(len(generated.completions), 'completion')}, {plural(tokens, 'token')} in {generated.seconds:.2f} s; "
        f"{path}; {dtype}, {machine}"
    )


def check_memory(model: Any, input_ids: Tensor, sampling: Sampling, *, shared: bool) -> None:
    """Refuse rows that the memory cannot hold.

    On a GPU only what the first step takes is counted, since rows that end early free memory. On the CPU all keys and
    values count: there the system ends a process that takes too much, without an error. `input_ids` are
    ``[prompts, length]``; with `shared`, prompts are stored once.
    """
    prompts, length = input_ids.shape
    rows = prompts * sampling.n
    needed = rows * (8 * (length + sampling.max_new_tokens) + 4 * vocabulary_of(model))  # ids, and float32 logits
    if model.device.type == "cpu":
        needed += _kv_bytes(model, prompts, length, sampling, shared)
    on_gpu = model.device.type == "cuda"
    if needed > (memory := torch.cuda.mem_get_info(model.device)[1] if on_gpu else cpu_memory()):
        raise InputError(
            f"{_rows(rows, sampling)} need up to {bytes_text(needed)} of memory, {model.device} has "
            f"{bytes_text(memory)}; lower --n or --max-new-tokens"
        )


def _rows(rows: int, sampling: Sampling) -> str:
    return f"{plural(rows, 'completion')} of up to {sampling.max_new_tokens:,} tokens"


def _kv_bytes(model: Any, prompts: int, length: int, sampling: Sampling, shared: bool) -> int:
    try:
        shape = KVSizes.from_config(model.config)
    except ValueError:  # not a cache of keys and values alone
        return 0
    stored = shape.kv_bytes(sampling.n, length, sampling.max_new_tokens, model.dtype.itemsize)
    return prompts * (stored.shared if shared else stored.stock)
