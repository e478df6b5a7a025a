"""Drawing completions with `model.generate`, their log-probabilities, and their texts."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import InputError
from ..measurement import draw as measurement
from ..measurement.draw import Drawn, continuation, memory_and_logit_errors
from ..model_names import max_positions
from .memory import memory_error
from .sampling import Sampling


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
        if limit is not None and len(own) + max_new_tokens > limit:
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
    options: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        options = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    if stop:
        options |= {"stop_strings": list(stop), "tokenizer": tokenizer}
    rows = len(inputs["input_ids"]) * sampling.n
    with memory_and_logit_errors(model, lambda: memory_error(rows, sampling, model.device)):
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
    """Tokens up to the one that ended the completion, and what that was; behind it there is padding."""
    length = next((index + 1 for index, token in enumerate(ids) if token in end_tokens), len(ids))
    ended = bool(ids) and ids[length - 1] in end_tokens

    def stopped(tokens: int) -> bool:
        text = tokenizer.decode(ids[:tokens], clean_up_tokenization_spaces=False)
        return any(string in text for string in stop)

    if stop and stopped(length):
        return bisect.bisect_left(range(length), True, key=stopped), "stop"
    return length, "stop" if ended else "length"
