"""Adapter to transformers: an attention function and a mask function in its official registries.

transformers' attention classes pass what the cache layer's ``update`` returns to their attention function, as ``key``
and ``value``, whatever its type. Layers of a shared-context cache return a `SharedKV`, and the attention function here
calls its `attend`. Likewise the mask function returns a `SlidingWindow` instead of a mask tensor. A model's configs
name these two functions only inside `overrides.active`, which wraps every forward pass over such a cache.

Models for images add to causal masks: transformers' `create_causal_mask` takes ``block_sequence_ids``, the number of
the image that each token is of, and -1 for text; tokens of an image see each other. Models that always give them get a
mask function which is causal for text.

Overrides of attention code that does not use this interface (`overrides`) call `attend_shared` and `attend_encoded`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from functools import partial
from inspect import getclosurevars
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, EncoderDecoderCache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .._compat import setting
from ..errors import Unsupported
from .kv import BidirectionalMask, CausalMask, CrossKV, Scoring, SharedKV, SlidingWindow
from .overrides import (
    ATTENTION_NAME,
    RowLengths,
    autocast_dtype,
    cast,
    lengths_of_pass,
    no_autocast,
    own_code_of,
    stock_attention,
)

NOT_CAUSAL = "the model's mask is not plain causal attention"


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
        with code that reads masks, a `CausalMask` instead of None. For attention without a causal rule a
        `BidirectionalMask`, which layers over the cache refuse, but for cross-attention.

    Raises:
        Unsupported: The mask is neither causal nor that of a sliding window.
    """
    lengths = lengths_of_pass()
    if lengths is None:  # a stock pass of another thread
        name = stock_attention(kwargs["config"])
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
    added_in_overrides = own is not None and own.reads_masks
    if mask_function is bidirectional_mask_function and not added_in_overrides:  # which would not see it
        return BidirectionalMask(kwargs.get("attention_mask"))
    if (not allow_is_causal_skip and not added_in_overrides) or (
        local_size is None and mask_function is not causal_mask_function
    ):
        raise Unsupported(NOT_CAUSAL)
    if window is None:
        return CausalMask() if added_in_overrides else None
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


MaskFunction = Callable[..., Any]

_UNION: Final = f"{or_masks.__qualname__}.<locals>.or_mask"
_BLOCKS: Final = f"{blockwise_overlay.__qualname__}.<locals>.inner_mask"


def without_blocks(mask_function: MaskFunction, queries: int) -> MaskFunction:
    """The mask function without blocks that show queries nothing more: of text alone, or of a decode step.

    Args:
        queries: Tokens of each row. One is a step's, which models give as text; of several, blocks are read from the
            device.
    """
    if getattr(mask_function, "__qualname__", "") != _UNION:
        return mask_function
    first, *others = getclosurevars(mask_function).nonlocals["mask_functions"]
    if len(others) != 1 or getattr(others[0], "__qualname__", "") != _BLOCKS:
        return mask_function
    blocks: Tensor = getclosurevars(others[0]).nonlocals["block_sequence_ids"]
    inert = queries == 1 or bool((blocks < 0).all())
    return first if inert else mask_function


_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "use_cache", "logits_to_keep"),
    *("output_hidden_states", "output_router_logits"),
}
"""Further arguments of attention classes, without an effect on causal attention."""


def register_without_effect(argument: str) -> None:
    """Register an argument that some layers of a model read and others, of the attention interface, only get."""
    _WITHOUT_EFFECT.add(argument)


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
        distances: Biases by distance, of overrides alone; see `Scoring.distances`.
        kwargs: Arguments of other attention functions; must be None, False, or without an effect on causal attention.

    Returns:
        ``[batch, queries, heads, head_dim]`` and None (no attention weights).

    Raises:
        Unsupported: The operators do not support the layer's attention.
    """
    lengths = lengths_of_pass()
    if not isinstance(key, SharedKV):
        if lengths is None:  # a stock pass of another thread
            extra = {"softcap": softcap, "sliding_window": sliding_window, "s_aux": s_aux, "is_causal": is_causal}
            kwargs |= {name: given for name, given in extra.items() if given is not None}
            stock = _stock_attention(module)
            return stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
        key = lengths.attends_to(module, key, value)
    cross = isinstance(key, CrossKV)
    if attention_mask is not None:
        _check_mask(attention_mask, cross=cross)
    if dropout:
        raise Unsupported(f"attention dropout is {dropout}, and decoding needs 0", "call model.eval()")
    causal = cross or (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if not causal and query.shape[2] > 1:
        raise Unsupported(f"{type(module).__name__} does not attend causally (is_causal=False)")
    if kwargs.keys() - _WITHOUT_EFFECT:
        _check_arguments(module, kwargs)
    window = None
    if not (sliding_window is None and attention_mask is None and key.stored_window is None):
        window = _window(module, key, sliding_window, attention_mask, lengths)
    if lengths is not None and not (softcap is None and s_aux is None):
        _check_ignored(module, "s_aux" if softcap is None else "softcap")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    sinks = None if s_aux is None else _checked_sinks(s_aux, query.shape[1])
    scoring = Scoring(scale, softcap, window, sinks, distances)
    if isinstance(key, CrossKV):
        _show(module, key, attention_mask, sinks)
    if autocast_dtype(query.device) is not None:
        query = cast(query)  # as the cache layer did with keys and values
        with no_autocast(query.device):
            out = key.attend(query, scoring)
    else:
        out = key.attend(query, scoring)
    return out.contiguous(), None  # some models take a view of it


def _check_mask(mask: Tensor | SlidingWindow | BidirectionalMask, *, cross: bool) -> None:
    """Raise Unsupported unless a layer's mask is that of its kind of attention."""
    if isinstance(mask, BidirectionalMask) and not cross:
        raise Unsupported(NOT_CAUSAL)
    if not isinstance(mask, BidirectionalMask if cross else SlidingWindow):
        raise Unsupported("the layer adds a mask of its own to the scores")


def _show(module: nn.Module, key: CrossKV, mask: Any, sinks: Tensor | None) -> None:
    """Set what cross-attention sees by its mask; raises Unsupported for sinks."""
    if sinks is not None:
        raise Unsupported(f"{type(module).__name__} has attention sinks in its cross-attention")
    key.show(mask.shown if isinstance(mask, BidirectionalMask) else None)


def _check_arguments(module: nn.Module, arguments: dict[str, Any]) -> None:
    """Raise Unsupported for further arguments that may have an effect."""
    for name, given in arguments.items():
        if given is not None and given is not False and name not in _WITHOUT_EFFECT:
            raise Unsupported(
                f"{type(module).__name__} passes {name!r} ({type(given).__name__}) to its attention function, with "
                "an unknown effect"
            )


def _window(
    module: nn.Module,
    key: SharedKV,
    sliding_window: int | None,
    mask: Tensor | SlidingWindow | BidirectionalMask | None,
    lengths: RowLengths | None,
) -> int | None:
    """The layer's window if it hides tokens, which must be that of its mask and, where it has none, of the cache."""
    window = sliding_window if sliding_window is not None and sliding_window > 0 else None  # 0 and -1 mean none
    if window is not None and lengths is not None:
        window = lengths.keep_if_binding(window)
    masked = mask.size if isinstance(mask, SlidingWindow) else None
    if window != masked:
        raise Unsupported(
            f"{type(module).__name__} names a sliding window of {window} tokens, but its mask one of {masked}"
        )
    stored = key.stored_window
    if stored is not None and window is None and lengths is not None and lengths.keep_if_binding(stored) is not None:
        raise Unsupported(
            f"the config names a sliding window of {stored} tokens, beyond which transformers' cache "
            f"forgets, but {type(module).__name__} attends without one"
        )
    return window


def _check_ignored(module: nn.Module, option: str) -> None:
    """Raise Unsupported for an option of scores where stock's attention would be sdpa, which has none."""
    if stock_attention(module.config) == "sdpa":
        raise Unsupported(
            f"{type(module).__name__} passes {option!r}, which transformers' sdpa attention leaves out or refuses",
            "call model.set_attn_implementation('eager')",
        )


def _checked_sinks(sinks: Tensor, heads: int) -> Tensor:
    if sinks.shape != (heads,):
        raise Unsupported(
            f"the layer has attention sinks of shape {tuple(sinks.shape)}, and one number for each of its {heads} "
            "query heads is supported"
        )
    return sinks.float().contiguous()


def _stock_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function that a module's config names when no pass has switched it."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    name = stock_attention(module.config)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


AttentionInterface.register(ATTENTION_NAME, shared_context_attention)
AttentionMaskInterface.register(ATTENTION_NAME, shared_context_mask)


_positions: ContextVar[Tensor | None] = ContextVar("hf_fastdecode_positions", default=None)


at_positions = partial(setting, _positions)
"""Context of a forward pass over tokens at these positions, ``[rows or 1, queries]`` int64."""


def given_positions() -> Tensor | None:
    """As `positions_of_pass`; None where the pass is given none."""
    return _positions.get()


def positions_of_pass() -> Tensor:
    """Positions of the current pass's tokens, for overrides whose module is not given them; see `at_positions`."""
    positions = _positions.get()
    assert positions is not None
    return positions


def attend_shared(
    module: nn.Module,
    query: Tensor,
    kv: SharedKV,
    *,
    scaling: float,
    window: int | None = None,
    distances: Tensor | None = None,
) -> Tensor:
    """Attention for overrides: causal, and within a window or with `Scoring.distances` if given.

    Takes queries ``[batch, heads, queries, head_dim]`` and what the cache layer's ``update`` returned; returns
    ``[batch, queries, heads, head_dim]``.
    """
    lengths = lengths_of_pass()
    binding = window if lengths is None else lengths.keep_if_binding(window)
    mask = None if binding is None else SlidingWindow(binding)
    own = {"sliding_window": window, "is_causal": True, "distances": distances}
    out, _ = shared_context_attention(module, query, kv, kv, mask, scaling, **own)
    return out


def attend_encoded(
    module: Any,
    query: Tensor,
    cache: EncoderDecoderCache,
    mask: Any,
    *,
    scaling: float,
    project: Callable[[], tuple[Tensor, Tensor]],
) -> Tensor:
    """Cross-attention for overrides: to an encoder's output, whose keys and values a layer's first pass stores.

    Args:
        query: ``[batch, heads, queries, head_dim]``; the result is ``[batch, queries, heads, head_dim]``.
        cache: What the decoder was given, see `cache.layers.cross.CrossView`.
        mask: What the mask function returned.
        project: Makes keys and values, ``[inputs, kv_heads, tokens, head_dim]`` each; called in the first pass.
    """
    stored, layer = cache.cross_attention_cache, module.layer_idx
    kv: Any = stored.layers[layer].keys
    if not cache.is_updated.get(layer):
        kv, _ = stored.update(*project(), layer)
        cache.is_updated[layer] = True
    out, _ = shared_context_attention(module, query, kv, kv, mask, scaling)
    return out


def outgrows(length: int) -> bool:
    """Whether the longest row of the pass has more tokens, for overrides that compute something else then."""
    lengths = lengths_of_pass()
    return lengths is not None and lengths.keep_if_binding(length) is not None


def kept_for_capture(key: Hashable, make: Callable[[int], Tensor]) -> Tensor:
    """A table that a captured graph reads, by its key; made in the capture's first pass and kept as long as the graph.

    `make` is given the tokens of the longest row. The table may be too short for longer ones, see `outgrows`: a
    capture serves none that outgrow its tables.
    """
    lengths = lengths_of_pass()
    assert lengths is not None
    if key not in lengths.tables:
        lengths.tables[key] = make(lengths.longest)
    return lengths.tables[key]
