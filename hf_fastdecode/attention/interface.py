"""The adapter to transformers: one attention function and one mask function in its official registries.

A cache layer's ``update`` may return any object, and attention classes hand it to the attention function as ``key``.
Ours returns a `SharedKV`, which knows where its keys lie; the attention function asks it to attend. A model's configs
name the two functions only inside `active`, which it enters for the forward passes that carry a shared-context cache.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "hf_fastdecode"
"""The name under which the two functions stand in transformers' registries."""

# What an attention class may pass that changes the scores in a way the operators do not know.
_UNSUPPORTED_ARGUMENTS = ("s_aux", "position_bias", "alibi", "head_mask", "block_mask", "cache")


class UnsupportedAttentionError(Exception):
    """A layer computes attention in a way that shared context cannot; the caller falls back to stock decoding."""


class NotATensorError(UnsupportedAttentionError, AttributeError):
    """Code that knows only tensors got hold of keys and values of a shared-context cache."""

    def __init__(self, what: str):
        super().__init__(
            f"{what}: keys and values of a SharedContextCache are not tensors; call the model itself (not a "
            "submodule) after hf_fastdecode.enable(model)"
        )


class SharedKV(ABC):
    """What a shared-context cache layer returns from ``update`` in the place of key and value tensors."""

    @abstractmethod
    def attend(self, query: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Attend ``query`` ``[batch, heads, queries, head_dim]``; returns ``[batch, queries, heads, head_dim]``."""

    def __getattr__(self, name: str) -> Any:
        raise NotATensorError(repr(name))  # reached only for attributes that do not exist

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotATensorError(getattr(func, "__name__", repr(func)))


# The longest row that the active cache will hold; None outside `active`, so also in other threads.
_max_tokens: ContextVar[int | None] = ContextVar("hf_fastdecode_max_tokens", default=None)


class _Switched:
    """Configs that name our functions at the moment, with what they named before and how many passes want it so.

    Passes of several threads, or of models that share a config, overlap in any order: the first one in switches a
    config, the last one out switches it back.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: dict[int, tuple[str | None, int]] = {}

    def enter(self, config: PreTrainedConfig) -> None:
        with self._lock:
            before, count = self._entries.get(id(config), (config._attn_implementation_internal, 0))
            self._entries[id(config)] = before, count + 1
            config._attn_implementation_internal = ATTENTION_NAME

    def leave(self, config: PreTrainedConfig) -> None:
        with self._lock:
            before, count = self._entries.pop(id(config))
            if count > 1:
                self._entries[id(config)] = before, count - 1
            else:
                config._attn_implementation_internal = before

    def before(self, config: PreTrainedConfig) -> str:
        """What a switched config named; the default when nothing was named."""
        with self._lock:
            return self._entries.get(id(config), (None, 0))[0] or "sdpa"


_switched = _Switched()


@contextmanager
def active(configs: Iterable[PreTrainedConfig], max_tokens: int) -> Iterator[None]:
    """Route the attention of modules with these configs through this module; restored on leaving, also by an error.

    Args:
        configs: The distinct config objects that the model's attention layers and mask creation read.
        max_tokens: The longest row that the cache will hold; a sliding window at least this long never binds.
    """
    entered: list[PreTrainedConfig] = []
    token = _max_tokens.set(max_tokens)
    try:
        for config in configs:
            _switched.enter(config)
            entered.append(config)
        yield
    finally:
        for config in entered:
            _switched.leave(config)
        _max_tokens.reset(token)


# Which layer reads which memory is no part of a compiled layer.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def shared_context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | SharedKV,
    value: Tensor | SharedKV,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: lets the cache layer attend where it holds shared context.

    Args:
        module: The attention layer.
        query: ``[batch, heads, queries, head_dim]``.
        key: What the cache layer's ``update`` returned.
        value: The same.
        attention_mask: None; `shared_context_mask` makes no mask, lengths say what a query sees.
        scaling: Factor on the scores; ``head_dim ** -0.5`` when None.
        dropout: Must be 0.
        softcap: Soft cap on the scores, if any.
        sliding_window: Window of the layer, if any; it must not bind.
        kwargs: Arguments of other attention functions.

    Returns:
        ``[batch, queries, heads, head_dim]`` and None (no attention weights).

    Raises:
        UnsupportedAttentionError: The layer asks for something the operators do not compute.
    """
    if not isinstance(key, SharedKV) and _max_tokens.get() is None:  # a stock pass of another thread
        stock = _stock_attention(module)
        extra = {"softcap": softcap, "sliding_window": sliding_window}
        kwargs |= {name: given for name, given in extra.items() if given is not None}
        return stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if not isinstance(key, SharedKV):
        raise UnsupportedAttentionError(f"{type(module).__name__} attends to keys that are not in the shared cache")
    if attention_mask is not None:
        raise UnsupportedAttentionError("the layer adds a mask of its own to the scores")
    if dropout:
        raise UnsupportedAttentionError(f"attention dropout is {dropout}, and decoding needs 0; call model.eval()")
    for name in _UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"the layer's attention takes {name!r}, which is not supported")
    _check_window(sliding_window or None)  # some configs write 0 for no window
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return key.attend(query, scale, softcap).contiguous(), None  # some models take a view of it


def shared_context_mask(
    *args: Any,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Any:
    """The mask function: makes no mask, after checking that the model asks for plain causal attention.

    Args:
        args: What every mask function takes first; lengths say all of it here.
        mask_function: The rule of which key a query sees.
        local_size: Window or chunk length of a local attention layer, if any; it must not bind.
        allow_is_causal_skip: transformers clears it when the model puts another rule over the causal one.
        kwargs: What other mask functions take.

    Raises:
        UnsupportedAttentionError: The mask is not causal, or a window binds.
    """
    if _max_tokens.get() is None:  # a stock pass of another thread
        name = _switched.before(kwargs["config"])
        given = {
            "mask_function": mask_function,
            "allow_is_causal_skip": allow_is_causal_skip,
            "local_size": local_size,
        }
        return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **given, **kwargs)
    _check_window(local_size)
    if not allow_is_causal_skip or (local_size is None and mask_function is not causal_mask_function):
        raise UnsupportedAttentionError("the model's mask is not plain causal attention")
    return None


def _check_window(window: int | None) -> None:
    longest = _max_tokens.get()
    if window is not None and longest is not None and longest > window:
        raise UnsupportedAttentionError(
            f"a sliding window of {window} tokens is shorter than the longest row, {longest} tokens"
        )


def _stock_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that a module's config named before it was switched."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    name = _switched.before(module.config)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


AttentionInterface.register(ATTENTION_NAME, shared_context_attention)
AttentionMaskInterface.register(ATTENTION_NAME, shared_context_mask)
