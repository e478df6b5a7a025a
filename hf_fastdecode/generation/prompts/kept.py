"""Prefill of a cache that the caller keeps, by `hf_fastdecode.prefill`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel

from ..._compat import CACHE
from ...cache.shared import SharedContextCache
from ...errors import Unsupported
from ..call_context import calls_of_prefill
from ..fingerprint import filled_by
from ..inputs.given import holds_inputs
from ..model_state import ModelState
from ..options import Options
from ..structure import Structure
from ..support import check_prefill, check_sequence_parallel, is_nothing, rope_limit
from .by_rows import prefill_passes
from .prompt_plan import ComparedPrompts, PromptGroup, PromptPlan, StoredPrompts, compare_prompts, continuation_of
from .reading import Prompts, read_text

_ONE_TOKEN: Final[dict[str, Any]] = {
    "max_new_tokens": 1,
    "do_sample": False,
    "num_beams": 1,
    "num_return_sequences": 1,
    "use_cache": True,
    "return_dict_in_generate": True,
    "output_hidden_states": False,
    "output_attentions": False,
    "guidance_scale": 1.0,
}
"""Settings of the call that prefills prompts with images; without them, the model's own defaults would hold."""

_TOKENIZE: Final = "call the tokenizer: tokenizer(prompts)"

Given = Tensor | Sequence[Tensor | Sequence[int]] | Mapping[str, Any]
"""Prompts as `prefill` is given them."""


def prefill_kept(model: PreTrainedModel, model_state: ModelState, inputs: Given) -> SharedContextCache:
    with model_state.gathered(model):
        structure = model_state.structure_of(model)
        with structure.ranks.watchdog.call("prefill", model_state.options.peer_timeout):
            if holds_inputs(inputs, model):
                return _prefill_by_call(model, model_state, inputs)
            return _prefill_text(model, structure, model_state.options, inputs)


def _prefill_text(inner: PreTrainedModel, structure: Structure, options: Options, inputs: Given) -> SharedContextCache:
    limit = options.max_prefill_tokens
    with structure.ranks.together() as offer:
        check_prefill(inner, structure)
        input_ids, mask = padded_ids(inputs)
        with _or_value_error(f"{type(inner).__name__} cannot divide these contexts between processes"):
            check_sequence_parallel(inner, structure, longest=input_ids.shape[1])
        with _or_value_error("these prompts cannot be prefilled"):  # generate checks them again, with its own length
            prompts = read_text(inner, structure, input_ids, mask)
        _check_rope(inner, input_ids.shape[1] if mask is None else int(mask.sum(1).max()))
        _check_vocabulary(inner, prompts.groups)
        cache = SharedContextCache(backend=options.backend)
        cache.state.division, cache.gaps = structure.division, any(group.gaps for group in prompts.groups)
        plan, rows = _plan(prompts, cache, structure, options)
        given = {"the prompts' tokens": plan.new_tokens, "number of prompts": len(plan.forest.paths)}
        offer.compare(lambda: given | {"max_prefill_tokens": limit}, "prefill was called differently")
    with torch.no_grad(), _or_value_error(f"{type(inner).__name__} cannot share context"):
        distinct, ends = prompts.distinct_rows() if prompts.by_rows else None, plan.last_tokens
        passes = prefill_passes(
            *(inner, cache, plan, continuation_of(structure.layout)),
            rows=distinct,
            wanted=ends,
            length=prompts.width,
            max_tokens=limit,
        )
        deque(passes, maxlen=0)
    if rows is not None:
        cache.select_rows(rows)
    cache.fingerprint, cache.protected_segments = filled_by(None, inner, structure.walk), len(cache.segment_tokens)
    return cache


def _prefill_by_call(inner: PreTrainedModel, model_state: ModelState, inputs: Mapping[str, Any]) -> SharedContextCache:
    """Prefill prompts with images by a call of `generate` for one token, which prepares positions."""
    for name in ("input_ids", "attention_mask"):
        value = inputs.get(name)
        if not isinstance(value, Tensor | None):
            raise ValueError(
                f"beside images {name} must be a tensor, got {type(value).__name__}; call the processor with "
                "return_tensors='pt'"
            )
    config = GenerationConfig(**_ONE_TOKEN)
    cache = SharedContextCache(backend=model_state.options.backend)
    with calls_of_prefill():
        kept = inner.generate(**inputs, **{CACHE: cache}, generation_config=config)[CACHE]
    kept.state.max_suffix, kept.protected_segments = None, len(kept.segment_tokens)
    return kept


@contextmanager
def _or_value_error(what: str) -> Iterator[None]:
    try:
        yield
    except Unsupported as error:
        raise ValueError(f"{what}: {error}") from error


def _plan(
    prompts: Prompts, cache: SharedContextCache, structure: Structure, options: Options
) -> tuple[PromptPlan, list[int] | None]:
    """The plan of prompts in the given order, or sorted if that stores fewer tokens, with the row of each prompt then.

    Only neighbouring prompts share, and sorting makes prompts with a common prefix neighbours. The given order is
    preferred because evenly spaced spans of consecutive rows are read in one operator call.
    """
    groups, stored = prompts.groups, StoredPrompts(cache)

    def compared(groups: list[PromptGroup]) -> ComparedPrompts:
        found = compare_prompts(groups, stored, min_shared_tokens=options.min_shared_tokens)
        return continuation_of(structure.layout).reusing(found, cache, options.worth_passes)

    given = compared(groups)
    if prompts.apart:  # no two of them share
        given = given.apart()
    if prompts.by_rows:
        return given.plan(), None
    texts = [group.tokens.numpy().tobytes() for group in groups]
    order = sorted(range(len(groups)), key=texts.__getitem__)
    alike = [list(indices) for _, indices in groupby(order, key=texts.__getitem__)]
    in_order = compared(
        [PromptGroup(groups[same[0]].tokens, sum(groups[index].count for index in same)) for same in alike]
    )
    if in_order.new_length >= given.new_length:
        return given.plan(), None
    starts = [0, *accumulate(group.count for group in groups)]
    rows = [row for index in order for row in range(starts[index], starts[index + 1])]
    return in_order.plan(), sorted(range(len(rows)), key=rows.__getitem__)


def _check_rope(model: PreTrainedModel, longest: int) -> None:
    """Reject prompts that no call could continue from, because frequencies change after them."""
    limit = rope_limit(model.config.get_text_config(decoder=True))
    if limit is not None and longest >= limit:
        raise ValueError(
            f"a prompt of {longest} tokens cannot be kept: the position embedding of {type(model).__name__} changes "
            f"beyond {limit} tokens, so no call could continue from it; prefill at most {limit - 1} tokens, or call "
            "generate without a kept cache"
        )


def _check_vocabulary(model: PreTrainedModel, groups: list[PromptGroup]) -> None:
    """Reject out-of-vocabulary ids: on a GPU the lookup would trigger a device assert, fatal to the CUDA context."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if size is None:
        return
    row = 0
    for group in groups:
        for found in (int(group.tokens.min()), int(group.tokens.max())):
            if not 0 <= found < size:
                raise ValueError(
                    f"prompt {row} holds the id {found}; {type(model).__name__} has embeddings for 0 to {size - 1}: "
                    "use its own tokenizer"
                )
        row += group.count


def padded_ids(inputs: object) -> tuple[Tensor, Tensor | None]:
    """``input_ids`` and ``attention_mask``, both ``[prompts, length]``, of prompts as `prefill` is given them.

    Lists are left-padded. The mask is None if none was given, or if a list needs no padding.

    Raises:
        ValueError: `inputs` are not prompts.
    """
    if not isinstance(inputs, Mapping):
        inputs = {"input_ids": inputs}
    input_ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(input_ids, Tensor | list | tuple):
        raise ValueError(
            f"input_ids must be a tensor or a list of prompts, got {type(input_ids).__name__}; {_TOKENIZE}"
        )
    for name, value in inputs.items():
        # Processors say of prompts without images that all tokens are of text.
        of_text = name == "mm_token_type_ids" and isinstance(value, Tensor) and not bool(value.any())
        if name not in ("input_ids", "attention_mask") and not is_nothing(value) and not of_text:
            raise ValueError(
                f"of prompts of text prefill takes input_ids and attention_mask, got {name!r} too; leave it out, or "
                "if the model takes images, pass all that its processor returns with return_tensors='pt'"
            )
    if not isinstance(input_ids, Tensor):
        return _padded(input_ids, mask)
    if not isinstance(mask, Tensor | None):
        raise ValueError(
            f"attention_mask must be a tensor, as input_ids is, got {type(mask).__name__}; call the tokenizer with "
            "return_tensors='pt'"
        )
    return _checked(input_ids), mask


def _checked(input_ids: Tensor) -> Tensor:
    if input_ids.dim() != 2:
        shape = list(input_ids.shape)
        remedy = "; for one prompt, input_ids[None]" if input_ids.dim() == 1 else ""
        raise ValueError(f"input_ids must have shape [prompts, length], got {shape}{remedy}")
    if input_ids.numel() == 0:
        raise ValueError(
            f"the prompts are empty: input_ids has shape {list(input_ids.shape)}; give at least one token"
        )
    _check_dtype(input_ids, "input_ids")
    return input_ids


def _padded(prompts: Sequence[object], masks: object) -> tuple[Tensor, Tensor | None]:
    if not prompts:
        raise ValueError("the list of prompts is empty; give at least one prompt")
    ids = [_integers(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]
    shown = [torch.ones_like(one) for one in ids]
    if masks is not None:
        if not isinstance(masks, list | tuple) or len(masks) != len(ids):
            found = f"a list of {len(masks)}" if isinstance(masks, list | tuple) else type(masks).__name__
            raise ValueError(
                f"attention_mask must be a list of {len(ids)} rows, as input_ids is, got {found}; pass what one call "
                "of the tokenizer returned"
            )
        shown = [_integers(mask, f"attention_mask of prompt {index}") for index, mask in enumerate(masks)]
        for index, (own, mask) in enumerate(zip(ids, shown, strict=True)):
            if len(own) != len(mask):
                raise ValueError(
                    f"prompt {index} has {len(own)} ids and an attention_mask of {len(mask)}; pass what one call of "
                    "the tokenizer returned"
                )
    input_ids, mask = (pad_sequence(lists, batch_first=True, padding_side="left") for lists in (ids, shown))
    return input_ids, None if bool((mask == 1).all()) else mask


def _integers(values: object, name: str) -> Tensor:
    if isinstance(values, Tensor):
        if values.dim() != 1:
            remedy = "pass ids[0] of it" if values.dim() == 2 and len(values) == 1 else "pass one tensor for each"
            raise ValueError(f"{name} in a list must have shape [length], got {list(values.shape)}; {remedy}")
        _check_dtype(values, name)
        found = values.long().cpu()
    elif isinstance(values, list | tuple):
        for place, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ValueError(
                    f"{name} must be a list of integers, got {_shown(value)} at position {place}; {_TOKENIZE}"
                )
        found = torch.tensor(values, dtype=torch.int64, device="cpu")
    else:
        remedy = "for one prompt, pass [input_ids]" if isinstance(values, int) else _TOKENIZE
        raise ValueError(f"{name} must be a list of ids or a tensor [length], got {_shown(values)}; {remedy}")
    if not len(found):
        raise ValueError(f"{name} is empty; give at least one token, or leave the prompt out")
    return found


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"


def _check_dtype(ids: Tensor, name: str) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        found = str(ids.dtype).removeprefix("torch.")
        raise ValueError(f"{name} must be int64 or int32, got {found}; {_TOKENIZE}")
