"""Adapter to transformers: an attention function and a mask function in its official registries.

transformers' attention classes pass what the cache layer's ``update`` returns to their attention function, as ``key``
and ``value``, whatever its type. Layers of a shared-context cache return a `SharedKV`, and the attention function here
calls its `attend`. Likewise the mask function here returns a `SlidingWindow` instead of a mask tensor. A model's
configs name these two functions only inside `active`, which wraps every forward pass with a shared-context cache.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import Lock
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .._compat import ATTENTION_FIELD
from ..errors import Unsupported
from .autocast import autocast_dtype, cast, no_autocast
from .expanded_kv import ExpandedKV
from .kv import Scoring
from .mask_overlays import without_blocks
from .own_code import own_code_of
from .partial import Partial

ATTENTION_NAME = "hf_fastdecode"
"""Name of the two functions in transformers' registries."""

_NOT_CAUSAL = "the model's mask is not plain causal attention"

_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "use_cache", "logits_to_keep"),
    *("output_hidden_states", "output_router_logits"),
}
"""Further arguments of attention classes, without an effect on causal attention."""


def register_without_effect(argument: str) -> None:
    """Register an argument that some layers of a model read and others, of the attention interface, only get."""
    _WITHOUT_EFFECT.add(argument)


class NotATensorError(Unsupported, AttributeError):
    """Code that expects tensors got the placeholder of a shared-context cache."""

    def __init__(self, what: str, whose: str):
        super().__init__(
            f"{what}: {whose} of a SharedContextCache are not tensors",
            "call the model itself (not a submodule) after hf_fastdecode.enable(model)",
        )


class _NotATensor:
    _what: ClassVar[str]  # the tensors that it replaces

    def __getattr__(self, name: str) -> Any:
        raise NotATensorError(repr(name), self._what)  # reached only for attributes that do not exist

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotATensorError(getattr(func, "__name__", repr(func)), cls._what)


class SharedKV(_NotATensor, ABC):
    """Returned by ``update`` of a shared-context cache layer instead of key and value tensors.

    Attributes:
        stored_window: Last tokens that transformers' cache keeps in this layer; None for all.
        device: Where keys and values are.
        reads_latents: Whether it attends to latents, by queries that `patches.architectures.latent_attention` makes.
        expanded: Nodes that it does not attend to, as keys and values; None if there are none.
    """

    _what = "keys and values"
    stored_window: int | None = None
    device: torch.device
    reads_latents: bool = False
    expanded: ExpandedKV | None = None

    def to(self, device: torch.device, **kwargs: Any) -> SharedKV:
        """Itself, for layers that read what others store, on the same device; raises `NotATensorError` for others."""
        if device != self.device:
            raise NotATensorError(f"to({device})", self._what)
        return self

    @abstractmethod
    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        """Attend ``query`` ``[batch, heads, queries, head_dim]``; returns ``[batch, queries, heads, head_dim]``."""

    def attend_as_stored(self, query: Tensor, scoring: Scoring) -> Partial:
        """`attend` with its log-sum-exp, in steps with `expanded` nodes: ``out`` in the query's dtype."""
        raise NotImplementedError


class CrossKV(SharedKV):
    """Keys and values of an encoder's output, returned by layers of a cache for cross-attention."""

    @abstractmethod
    def show(self, mask: Tensor | None) -> None:
        """Set the tokens of each input that queries see, ``[inputs, tokens]`` bool; all of them when None."""


@dataclass(frozen=True)
class SlidingWindow(_NotATensor):
    """Returned by `shared_context_mask` instead of a sliding-window mask tensor."""

    _what: ClassVar[str] = "masks"
    size: int


class CausalMask(_NotATensor):
    """Returned by `shared_context_mask` to code that computes with its mask even where nothing is hidden."""

    _what = "masks"
    ndim = 0

    def to(self, *args: Any, **kwargs: Any) -> CausalMask:
        """Itself."""
        return self


@dataclass(frozen=True)
class BidirectionalMask(_NotATensor):
    """Returned by `shared_context_mask` for attention without a causal rule, which cross-attention alone may compute.

    Decoders of the BART family make such a mask for an encoder also where they have none.

    Attributes:
        shown: ``[inputs, tokens]`` bool: the tokens that it shows; all of them when None.
    """

    _what: ClassVar[str] = "masks"
    shown: Tensor | None


@dataclass
class RowLengths:
    """Length of the longest row in the forward passes inside `active`, which decides whether windows hide tokens.

    Attributes:
        longest: Tokens of the longest row at the end of the pass. Windows of at least this size hide nothing and are
            dropped: layers then attend without a window.
        same_up_to: The smallest window that was dropped; None if none was. Rows of up to this length get the same
            computation, longer ones need the window (a captured step checks that).
    """

    longest: int
    same_up_to: int | None = None

    def keep_if_binding(self, window: int | None) -> int | None:
        """The window if it hides any token of the longest row; else None, with the window noted in `same_up_to`."""
        if window is None or self.longest > window:
            return window
        self.same_up_to = min(window, self.same_up_to or window)
        return None


# Of the current forward pass; None outside `active`, hence in other threads.
_lengths: ContextVar[RowLengths | None] = ContextVar("hf_fastdecode_lengths", default=None)


def lengths_of_pass() -> RowLengths | None:
    """Those of the current forward pass of this thread; None outside `active`."""
    return _lengths.get()


def require_active(what: str = "update", whose: str = "keys and values") -> None:
    """Raise `NotATensorError` outside of `active`: only passes within it can read a shared-context cache."""
    if _lengths.get() is None:
        raise NotATensorError(what, whose)


class _NameOfPasses(str):
    """`ATTENTION_NAME`, which stock passes of other threads also find equal to what their config named before."""

    before: str | None

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (_lengths.get() is None and self.before == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class _ConfigSwitch:
    """Makes configs name our functions for the time of some forward passes, and restores what they named before.

    Passes of several threads, or of models that share a config, may overlap, so entries are counted: the first pass to
    enter switches a config, the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: dict[int, tuple[str | None, int]] = {}

    def enter(self, config: PreTrainedConfig) -> None:
        with self._lock:
            before, count = self._entries.get(id(config), (getattr(config, ATTENTION_FIELD), 0))
            self._entries[id(config)] = before, count + 1
            setattr(config, ATTENTION_FIELD, _name_in(config, before))

    def leave(self, config: PreTrainedConfig) -> None:
        with self._lock:
            before, count = self._entries.pop(id(config))
            if count > 1:
                self._entries[id(config)] = before, count - 1
            else:
                setattr(config, ATTENTION_FIELD, before)

    def before(self, config: PreTrainedConfig) -> str:
        """The attention implementation that a config names when no pass has switched it, ``sdpa`` by default."""
        with self._lock:  # another thread may have restored the config since our function was called
            known = self._entries.get(id(config))
            name: str | None = getattr(config, ATTENTION_FIELD, None) if known is None else known[0]
        return name if name and name != ATTENTION_NAME else "sdpa"


def _name_in(config: PreTrainedConfig, before: str | None) -> str:
    own = own_code_of(type(config))
    if own is None or not own.compares_name:
        return ATTENTION_NAME
    name = _NameOfPasses(ATTENTION_NAME)
    name.before = before
    return name


_switch = _ConfigSwitch()


@contextmanager
def active(configs: Iterable[PreTrainedConfig], lengths: RowLengths) -> Iterator[None]:
    """Make these configs name this file's attention and mask function inside the context; restores them on exit.

    They are the distinct config objects that the model's attention layers and mask creation read.
    """
    entered: list[PreTrainedConfig] = []
    token = _lengths.set(lengths)
    try:
        for config in configs:
            _switch.enter(config)
            entered.append(config)
        yield
    finally:
        for config in entered:
            _switch.leave(config)
        _lengths.reset(token)


# Excluded from torch.compile: one compiled layer serves all layers, each with storage of its own.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def shared_context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | SharedKV,
    value: Tensor | SharedKV,
    attention_mask: Tensor | SlidingWindow | BidirectionalMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    distances: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function: calls `SharedKV.attend` of the cache layer.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        key: What the cache layer's ``update`` returned.
        attention_mask: What `shared_context_mask` returned for the layer.
        scaling: Factor on the scores; ``head_dim ** -0.5`` when None.
        dropout: Must be 0.
        sliding_window: Window of the layer, if any; if it hides tokens, the mask must have the same window.
        s_aux: ``[heads]``: attention sinks, if any, see `Scoring.sinks`.
        is_causal: Must be True for several queries of a row; the module's attribute of that name, if any, when None.
        distances: Biases by distance, of stand-ins alone; see `Scoring.distances`.
        kwargs: Arguments of other attention functions; must be None, False, or without an effect on causal attention.

    Returns:
        ``[batch, queries, heads, head_dim]`` and None (no attention weights).

    Raises:
        Unsupported: The operators do not support the layer's attention.
    """
    lengths = _lengths.get()
    if not isinstance(key, SharedKV) and lengths is None:  # a stock pass of another thread
        stock = _stock_attention(module)
        extra = {"softcap": softcap, "sliding_window": sliding_window, "s_aux": s_aux, "is_causal": is_causal}
        kwargs |= {name: given for name, given in extra.items() if given is not None}
        return stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    if not isinstance(key, SharedKV):
        raise Unsupported(f"{type(module).__name__} attends to keys that are not in the shared cache")
    cross = isinstance(key, CrossKV)
    if isinstance(attention_mask, BidirectionalMask) and not cross:
        raise Unsupported(_NOT_CAUSAL)
    if attention_mask is not None and not isinstance(attention_mask, BidirectionalMask if cross else SlidingWindow):
        raise Unsupported("the layer adds a mask of its own to the scores")
    if dropout:
        raise Unsupported(f"attention dropout is {dropout}, and decoding needs 0", "call model.eval()")
    causal = cross or (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if not causal and query.shape[2] > 1:
        raise Unsupported(f"{type(module).__name__} does not attend causally (is_causal=False)")
    for name, given in kwargs.items():
        if given is not None and given is not False and name not in _WITHOUT_EFFECT:
            raise Unsupported(
                f"{type(module).__name__} passes {name!r} ({type(given).__name__}) to its attention function, with "
                "an unknown effect"
            )
    window = sliding_window if sliding_window is not None and sliding_window > 0 else None  # 0 and -1 mean none
    if lengths is not None:
        window = lengths.keep_if_binding(window)
    masked = attention_mask.size if isinstance(attention_mask, SlidingWindow) else None
    if window != masked:
        raise Unsupported(
            f"{type(module).__name__} names a sliding window of {window} tokens, but its mask one of {masked}"
        )
    if window is None and lengths is not None and lengths.keep_if_binding(key.stored_window) is not None:
        raise Unsupported(
            f"the config names a sliding window of {key.stored_window} tokens, beyond which transformers' cache "
            f"forgets, but {type(module).__name__} attends without one"
        )
    ignored = [name for name, given in (("softcap", softcap), ("s_aux", s_aux)) if given is not None]
    if ignored and lengths is not None and _switch.before(module.config) == "sdpa":
        raise Unsupported(
            f"{type(module).__name__} passes {ignored[0]!r}, which transformers' sdpa attention leaves out or refuses",
            "call model.set_attn_implementation('eager')",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else _checked_sinks(s_aux, query.shape[1])
    scoring = Scoring(scale, softcap, window, sinks, distances)
    if isinstance(key, CrossKV):
        if sinks is not None:
            raise Unsupported(f"{type(module).__name__} has attention sinks in its cross-attention")
        key.show(attention_mask.shown if isinstance(attention_mask, BidirectionalMask) else None)
    if autocast_dtype(query.device) is None:
        out = key.attend(query, scoring)
    else:
        query = cast(query)  # as the cache layer did with keys and values
        with no_autocast(query.device):
            out = key.attend(query, scoring)
    return out.contiguous(), None  # some models take a view of it


def _checked_sinks(sinks: Tensor, heads: int) -> Tensor:
    if sinks.shape != (heads,):
        raise Unsupported(
            f"the layer has attention sinks of shape {tuple(sinks.shape)}, and one number for each of its {heads} "
            "query heads is supported"
        )
    return sinks.float().contiguous()


def shared_context_mask(
    *args: Any,
    mask_function: Callable[..., Any] = causal_mask_function,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Any:
    """Mask function: checks that the model asks for causal attention, windowed or not, and makes no mask.

    Args:
        args: Positional arguments of every mask function, for stock passes only.
        mask_function: Says which keys a query sees.
        local_size: Window or chunk length of a local attention layer, if any.
        allow_is_causal_skip: transformers clears it when the model adds another rule to the causal one.
        kwargs: Arguments of other mask functions.

    Returns:
        None for plain causal attention, or where no row outgrows the window, else a `SlidingWindow`. For architectures
        with code that reads masks, a `CausalMask` in place of None. For attention without a causal rule a
        `BidirectionalMask`, which layers over the cache refuse, but for cross-attention.

    Raises:
        Unsupported: The mask is neither causal nor that of a sliding window.
    """
    lengths = _lengths.get()
    if lengths is None:  # a stock pass of another thread
        name = _switch.before(kwargs["config"])
        given = {
            "mask_function": mask_function,
            "allow_is_causal_skip": allow_is_causal_skip,
            "local_size": local_size,
        }
        return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **given, **kwargs)
    if local_size is not None and local_size < 1:
        # A mask that hides every key. Models whose config has a window of 0 create it, but their layers do not use it.
        return SlidingWindow(local_size)
    plain = without_blocks(mask_function, int(kwargs["q_length"]))
    if plain is not mask_function:
        mask_function, allow_is_causal_skip = plain, True
    window = lengths.keep_if_binding(local_size)
    own = own_code_of(type(kwargs.get("config")))
    added_in_stand_ins = own is not None and own.reads_masks
    if mask_function is bidirectional_mask_function and not added_in_stand_ins:  # which would not see it
        return BidirectionalMask(kwargs.get("attention_mask"))
    if (not allow_is_causal_skip and not added_in_stand_ins) or (
        local_size is None and mask_function is not causal_mask_function
    ):
        raise Unsupported(_NOT_CAUSAL)
    if window is None:
        return CausalMask() if added_in_stand_ins else None
    if not _slides(mask_function, window):
        raise Unsupported(
            f"chunks of {window} tokens are shorter than the longest row, {lengths.longest} tokens; of local "
            "attention, only sliding windows are supported"
        )
    return SlidingWindow(window)


def _slides(mask_function: Callable[..., Any], window: int) -> bool:
    """Whether a mask function is a sliding window of `window` tokens, rather than one of chunks."""
    # Four ages of a key: just outside the window, the oldest inside, the query itself, and the next token. For two
    # adjacent queries, because the last query of a chunk sees what it would in a window.
    # On the CPU, whatever the default device, because a CUDA graph may be under capture.
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    query = torch.tensor([window, window + 1], device="cpu").repeat_interleave(4)
    age = torch.tensor([window, window - 1, 0, -1], device="cpu").repeat(2)
    key = query - age
    shown = mask_function(zero, zero, query, key).tolist()
    return bool(shown == [False, True, True, False] * 2)


def _stock_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that a module's config names when no pass has switched it."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    name = _switch.before(module.config)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


AttentionInterface.register(ATTENTION_NAME, shared_context_attention)
AttentionMaskInterface.register(ATTENTION_NAME, shared_context_mask)
