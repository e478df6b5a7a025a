"""Calls of a model that several processes compute together: each must make the same ones.

Without this, a process with other prompts or options would run other passes than the rest, which ends in an error of
the communication library, in a hang, or in tokens that no process would compute alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .._compat import CACHE
from ..cache.shared import SharedContextCache
from ..parallel.agreement import Ranks, described
from .call_context import CallContext
from .decoding.sampling import generator_state

_NOT_COMPARED = ("transformers_version",)


def require_same_call(call: CallContext, given: Mapping[str, Tensor], loop: str) -> None:
    """Raise ValueError on all ranks if a call's prompts, arguments or options differ between them.

    Args:
        given: Tensors that `generate` was given, by name.
        loop: What decodes.
    """
    _require_same(call.model, call.ranks, lambda: _fields(call, given, loop), "generate was called differently")


def _fields(call: CallContext, given: Mapping[str, Tensor], loop: str) -> dict[str, str]:
    fields = {name: value for name, value in given.items() if name not in call.arguments}
    fields |= {
        name: value
        for name, value in vars(call.config).items()
        if not name.startswith("_") and name not in _NOT_COMPARED
    }
    fields |= call.arguments
    fields |= {f"enable(..., {name}=)": value for name, value in vars(call.options).items()}
    cache = fields.pop(CACHE, None)
    of_cache = _of_cache(cache) if isinstance(cache, SharedContextCache) else described(cache)
    return {"decoding loop": loop, **_described(fields), CACHE: of_cache}


def _described(fields: Mapping[str, Any]) -> dict[str, str]:
    return {name: described(value) for name, value in fields.items()}


def require_same_prefill(
    model: PreTrainedModel, ranks: Ranks, new_tokens: Tensor, rows: int, max_prefill_tokens: int
) -> None:
    """Raise ValueError on all ranks if they would prefill different tokens, or in different passes."""
    fields = {"the prompts' tokens": new_tokens, "number of prompts": rows, "max_prefill_tokens": max_prefill_tokens}
    _require_same(model, ranks, lambda: _described(fields), "prefill was called differently")


def require_same_pass(model: PreTrainedModel, ranks: Ranks, input_ids: object, queries: int) -> None:
    """Raise ValueError on all ranks if a pass that the user's code runs has other tokens on some of them.

    They may have been drawn by a generator that nobody compared, or chosen otherwise in each process.

    Args:
        input_ids: ``[rows, queries]`` int64; embeddings are compared by their number of tokens alone.
    """
    fields = {"input_ids": input_ids, "number of tokens of a row": queries}
    _require_same(model, ranks, lambda: _described(fields), "a forward pass was called differently")


def require_same_ends(call: CallContext, end_tokens: Tensor | None, max_length: int | None) -> None:
    """Raise ValueError on all ranks if stopping criteria end rows at other tokens or lengths on some of them."""
    fields = {"stopping_criteria's end tokens": end_tokens, "max_length": max_length}
    _require_same(call.model, call.ranks, lambda: _described(fields), "generate was called differently")


def require_same_draws(call: CallContext, loop: str) -> None:
    """Raise ValueError on all ranks if a loop other than this package's would draw other tokens on some of them."""
    device = call.model.device
    if call.config.do_sample and call.ranks.differences(lambda: _described({"generator": generator_state(device)})):
        raise ValueError(
            f"the random generators ({device.type}) of the {call.ranks.count} processes that compute "
            f"{type(call.model).__name__} together differ, so that this call, which {loop} decodes, would draw other "
            "tokens on each: call transformers.set_seed(0), or with another number, on all of them before generate"
        )


def _require_same(model: PreTrainedModel, ranks: Ranks, fields: Callable[[], dict[str, str]], what: str) -> None:
    if (found := ranks.differences(fields)) is not None:
        raise ValueError(
            f"{what} on the {ranks.count} processes that compute {type(model).__name__} together: {found}; give all "
            "of them the same call"
        )


def _of_cache(cache: SharedContextCache) -> str:
    tokens = [described(tokens) for tokens in cache.segment_tokens]
    return f"{cache!r} of tokens {', '.join(tokens)}" if cache.rows else "an empty SharedContextCache"
