"""Decoders of encoder-decoders, and others of their shape: attention code, and positions by the cache's length.

Learned or sinusoidal positions of BART's family begin at the length of the cache, so that those of a prompt count its
padding, and those of a step would be constants in a captured graph. Some of its classes attend by
themselves; the others lack the flag that says that it may be replaced.

Sinusoidal positions of M2M-100, NLLB, SeamlessM4T, Speech2Text and SpeechT5 follow from a decoder's ids, counted from
the cache's length, a tensor in a captured step. The classes' code asks on the host whether its table is long enough.
So the table is chosen once for each capture, by the longest row that its steps serve: the module's, or a longer one
where the class lets its table grow. Rows that outgrow the others run eagerly, until they end or fail as in stock.

T5 and its relatives have biases by distance, which their attention makes over all slots of the cache. They are made
once per distance here, by the module's code, and added to the scores of self-attention in fp32; those of
cross-attention are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import EncoderDecoderCache

from ..._compat import CACHE_LENGTH, cache_in, takes_old_name
from ...attention.interface import attend_encoded, attend_shared, given_positions, kept_for_capture, outgrows
from ...attention.overrides import Method, OwnCode
from ...errors import Unsupported


def project_heads(inputs: Tensor, head_dim: int, *projections: Any) -> Any:
    """``[rows, heads, tokens, head_dim]`` of each projection of ``[rows, tokens, d]``."""
    return tuple(project(inputs).unflatten(-1, (-1, head_dim)).transpose(1, 2) for project in projections)


@takes_old_name
def attend_beside_encoder(
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: Any = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Overrides attention of SpeechT5, LED and TrOCR to a decoder's tokens, or to the encoder's output."""
    if position_bias is not None or not isinstance(cache, EncoderDecoderCache):
        raise Unsupported(f"{type(module).__name__} biases its scores, or has no cache of a decoder")
    encoded = hidden_states if key_value_states is None else key_value_states

    def project() -> Any:
        return project_heads(encoded, module.head_dim, module.k_proj, module.v_proj)

    (query,) = project_heads(hidden_states, module.head_dim, module.q_proj)
    if key_value_states is None:
        kv, _ = cache.self_attention_cache.update(*project(), module.layer_idx)
        out = attend_shared(module, query, kv, scaling=module.scaling)
    else:
        out = attend_encoded(module, query, cache, attention_mask, scaling=module.scaling, project=project)
    return module.out_proj(out.flatten(2)), None


def attend_and_return_cache(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None, Any]:
    out, weights = attend_beside_encoder(module, *args, **kwargs)
    return out, weights, cache_in(kwargs)


def embed_slots(module: Any, shape: torch.Size, *args: Any, **kwargs: Any) -> Tensor:
    """Overrides `LEDLearnedPositionalEmbedding.forward` where the cache's length is a tensor, as in a capture."""
    length = kwargs.get(CACHE_LENGTH, args[0] if args else 0)
    return F.embedding(length + torch.arange(shape[1], device=module.weight.device), module.weight)


def embed_positions(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Overrides `forward` of the positions' embeddings: ``[rows or 1, tokens, width]``."""
    if (positions := given_positions()) is None:  # of an encoder-decoder's pass, which counts from the cache's length
        stock_positions: Tensor = type(module).forward(module, *args, **kwargs)
        return stock_positions
    return F.embedding(positions + getattr(module, "offset", 0), module.weight)


@takes_old_name
def attend_bart(
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: Any = None,
    attn_prompt: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if attn_prompt is not None:
        raise Unsupported("its layers have keys and values of trained prompts")
    if isinstance(cache, EncoderDecoderCache):
        return attend_beside_encoder(module, hidden_states, key_value_states, cache, attention_mask)
    query, key, value = project_heads(hidden_states, module.head_dim, module.q_proj, module.k_proj, module.v_proj)
    kv, _ = cache.update(key, value, module.layer_idx)
    return module.out_proj(attend_shared(module, query, kv, scaling=module.head_dim**-0.5).flatten(2)), None


def _bart(positions: str, attention: str | None = None) -> OwnCode:
    """The entry of a decoder, by its classes of position embeddings and, where it attends by itself, of attention."""
    overrides: dict[str, dict[str, Method]] = {positions: {"forward": embed_positions}}
    if attention is not None:
        overrides[attention] = {"forward": attend_bart}
    return OwnCode(overrides, counts_padding=True)


def embed_sinusoidal(table_for: Callable[[Any, int], Tensor], module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Overrides `forward` of the positions' embeddings in captured passes: ``[rows, tokens, width]``.

    `table_for` gives a module's table for rows of up to so many tokens, ``[positions, width]``. Raises Unsupported
    where rows of a captured step may outgrow it.
    """
    length = kwargs.get(CACHE_LENGTH, args[-1])
    if not isinstance(length, Tensor):  # in a pass over prompts
        stock_positions: Tensor = type(module).forward(module, *args, **kwargs)
        # The graph reads that table, in whose place an eager pass of another thread may put a longer one.
        kept_for_capture((id(module), "prompts"), partial(own_table, module))
        return stock_positions
    table = kept_for_capture(id(module), partial(table_for, module))
    if outgrows(most := len(table) - module.padding_idx - 1):
        raise Unsupported(f"rows may outgrow its table of positions, which is for {most} tokens and does not grow")
    return F.embedding(module.create_position_ids_from_input_ids(args[0], module.padding_idx, length), table)


def own_table(module: Any, tokens: int) -> Tensor:
    table: Tensor = module.weights
    return table


def long_table(module: Any, tokens: int) -> Tensor:
    """The module's table, or a longer one of the same code, long enough for more tokens."""
    needed, table = module.padding_idx + 1 + tokens, own_table(module, tokens)
    if needed <= len(table):
        return table
    rows = 1 << (needed - 1).bit_length()
    longer: Tensor = module.get_embedding(rows, module.embedding_dim, module.padding_idx)
    return longer.to(table)


_GROWING, _FIXED = partial(embed_sinusoidal, long_table), partial(embed_sinusoidal, own_table)


def _m2m_100(name: str, method: Method, **more: Any) -> OwnCode:
    return OwnCode(in_captures={f"{name}SinusoidalPositionalEmbedding": {"forward": method}}, **more)


@takes_old_name
def attend_t5(
    module: Any,
    hidden_states: Tensor,
    mask: Any = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None, None]:
    """Overrides `T5Attention.forward`, whose first layer makes the biases of all."""
    if key_value_states is not None:
        return _t5_cross(module, hidden_states, key_value_states, cache, mask), None, None
    if position_bias is None and module.has_relative_attention_bias:
        position_bias = biases_by_distance(module)
    return _t5_self(module, hidden_states, cache, position_bias), position_bias, None


@takes_old_name
def attend_umt5(
    module: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Overrides `UMT5Attention.forward`, where each layer has other biases."""
    if encoder_hidden_states is not None:
        return _t5_cross(module, hidden_states, encoder_hidden_states, cache, attention_mask), None
    return _t5_self(module, hidden_states, cache, biases_by_distance(module)), None


def biases_by_distance(module: Any) -> Tensor:
    """``[heads, distances]`` fp32, up to the distance from which all have one bias."""
    farthest = module.relative_attention_max_distance
    return module.compute_bias(1, farthest + 1, past_seen_tokens=farthest)[0, :, 0].flip(-1).float().contiguous()


def _t5_self(module: Any, hidden_states: Tensor, cache: Any, biases: Tensor | None) -> Tensor:
    if hidden_states.shape[1] > 1 and not getattr(module, "is_causal", True):  # of UMT5 before transformers 5.24
        raise Unsupported(f"{type(module).__name__} does not attend causally (is_causal=False)")
    query, key, value = project_heads(hidden_states, module.key_value_proj_dim, module.q, module.k, module.v)
    kv, _ = cache.self_attention_cache.update(key, value, module.layer_idx)
    return module.o(attend_shared(module, query, kv, scaling=module.scaling, distances=biases).flatten(2))


def _t5_cross(module: Any, hidden_states: Tensor, encoded: Tensor, cache: Any, mask: Any) -> Tensor:
    width = module.key_value_proj_dim
    (query,) = project_heads(hidden_states, width, module.q)
    out = attend_encoded(
        module,
        query,
        cache,
        mask,
        scaling=module.scaling,
        project=lambda: project_heads(encoded, width, module.k, module.v),
    )
    return module.o(out.flatten(2))


def _t5(name: str, method: Method = attend_t5) -> OwnCode:
    return OwnCode({name: {"forward": method}}, counts_hidden=True, adds_biases=True)


ENCODER_DECODERS = {
    "bart": _bart("BartLearnedPositionalEmbedding"),
    "bigbird_pegasus": _bart("BigBirdPegasusLearnedPositionalEmbedding", "BigBirdPegasusDecoderAttention"),
    "blenderbot": _bart("BlenderbotLearnedPositionalEmbedding"),
    "blenderbot_small": _bart("BlenderbotSmallLearnedPositionalEmbedding"),
    "clvp": OwnCode({"ClvpSelfAttention": {"forward": attend_bart}}, reads_masks=True),
    "led": OwnCode(
        {"LEDDecoderAttention": {"forward": attend_and_return_cache}},
        in_captures={"LEDLearnedPositionalEmbedding": {"forward": embed_slots}},
    ),
    "longt5": _t5("LongT5Attention"),
    "m2m_100": _m2m_100("M2M100", _GROWING),
    "marian": _bart("MarianSinusoidalPositionalEmbedding"),
    "mbart": _bart("MBartLearnedPositionalEmbedding"),
    "mt5": _t5("MT5Attention"),
    "mvp": _bart("MvpLearnedPositionalEmbedding", "MvpAttention"),
    "nllb_moe": OwnCode(not_captured="the host reads which experts a step's tokens take"),
    "pegasus": _bart("PegasusSinusoidalPositionalEmbedding"),
    "plbart": _bart("PLBartLearnedPositionalEmbedding"),
    "seamless_m4t": _m2m_100("SeamlessM4T", _GROWING),
    "seamless_m4t_v2": _m2m_100("SeamlessM4Tv2", _GROWING),
    "speech_to_text": _m2m_100("Speech2Text", _FIXED),
    "speecht5": _m2m_100("SpeechT5", _FIXED, overrides={"SpeechT5Attention": {"forward": attend_beside_encoder}}),
    "switch_transformers": _t5("SwitchTransformersAttention"),
    "t5": _t5("T5Attention"),
    "trocr": _bart("TrOCRLearnedPositionalEmbedding", "TrOCRAttention"),
    "umt5": _t5("UMT5Attention", attend_umt5),
    "whisper": _bart("WhisperPositionalEmbedding"),
    "xglm": OwnCode({"XGLMAttention": {"forward": attend_bart}}, reads_masks=True),
}
"""Overrides by folder of ``transformers.models``."""
