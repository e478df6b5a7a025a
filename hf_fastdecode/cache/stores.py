"""A store of a layer: its kind and sizes on this device, how configs describe both, and which model types are known.

Models that keep their states elsewhere than in transformers' caches are in `attention.overrides`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch
from transformers import PreTrainedConfig

from ..attention.launch.plan import HeadShape
from ..attention.overrides import own_code_of
from ..kernels.forest_decode.limits import MAX_QUERIES, most_packed_of_latents

GROUP: Final = 16
"""Query heads that a program of the suffix kernel attends for: more would not fit in its registers."""


class Kind(StrEnum):
    """The content of a store.

    Attributes:
        FULL: Keys and values of every token.
        SLIDING: The same, of which a query reads the last `Store.window` tokens.
        CHUNKED: The same, of which a query reads its own chunk of `Store.window` tokens.
        STATE: A state of fixed size, which every token overwrites (Mamba, gated delta nets, short convolutions).
        LATENT: Latents of which keys and values are made (multi-head latent attention).
        CROSS: Keys and values of another sequence, which do not grow.
        OWN: What the layer's own code says, see `AttendsByItself`.
        OTHER: What one architecture alone stores, such as keys of an indexer.
    """

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"
    LATENT = "latent"
    CROSS = "cross"
    OWN = "own"
    OTHER = "other"


PER_TOKEN: Final = frozenset({Kind.FULL, Kind.SLIDING, Kind.CHUNKED, Kind.LATENT, Kind.OWN})
"""Kinds that store keys and values of every token, or of which nodes do."""


def kv_heads_of_kernels(heads: int) -> int:
    """The fewest groups of at most `GROUP` that `heads` query heads are divided into equally."""
    return next(count for count in range(1, heads + 1) if not heads % count and heads // count <= GROUP)


@dataclass(frozen=True)
class Store:
    """Keys and values, or states, that a layer stores in one place. Sizes are 0 where the config does not say them.

    Attributes:
        kind: What it holds.
        query_heads: Heads of the queries that read it, on this device.
        kv_heads: Heads of keys and values, on this device.
        head_dim: Numbers of a head's key; of latents, those of a token, which are all heads' key.
        value_dim: Numbers of a head's value; of latents, the first of those of the key.
        window: Tokens that a query reads at most; None for all.
        biased: Whether scores are biased by distance.
        states: Of a layer with states, how many it has of each sort.
        continues: Of a layer with states, whether passes of several tokens are known to continue from one.
        segments: Of a layer with states, whether its code is known to run once for each prompt of a packed row.
        stock_numbers: Elements of a token in transformers' cache, where these are other than `numbers`.
    """

    kind: Kind
    query_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    states: int = 0
    continues: bool = False
    segments: bool = False
    biased: bool = False
    stock_numbers: int = 0

    @property
    def packs(self) -> bool:
        """Whether the tokens of several prompts may be end to end in one row of a pass."""
        return self.segments if self.kind is Kind.STATE else self.kind is not Kind.CROSS

    @property
    def kernel_heads(self) -> int:
        """KV heads as decode kernels see them."""
        return kv_heads_of_kernels(self.query_heads) if self.kind is Kind.LATENT else self.kv_heads

    def head_shape(self, longest: int) -> HeadShape:
        """The heads of a step as decode kernels see them, for rows of up to so many tokens."""
        heads = self.kernel_heads
        windowed = self.biased or (self.window is not None and longest > self.window)
        group = max(1, self.query_heads // heads) if heads else 1
        return HeadShape(heads, group, self.head_dim, windowed, self.kind is Kind.LATENT, biased=self.biased)

    def most_queries(self, device: torch.device) -> int:
        """Most tokens of each row that decode kernels take."""
        if self.kind is not Kind.LATENT:
            return MAX_QUERIES
        return most_packed_of_latents(device) // (self.query_heads // max(1, self.kernel_heads))

    @property
    def group_size(self) -> int:
        """Query heads per KV head; 1 where the config does not say it."""
        return max(1, self.query_heads // self.kv_heads) if self.kv_heads else 1

    @property
    def attention(self) -> str:
        if self.kv_heads == self.query_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def numbers(self) -> int:
        """Numbers of a token's keys and values."""
        if self.kind is Kind.LATENT:
            return self.head_dim
        return self.kv_heads * (self.head_dim + self.value_dim)


STATEFUL: Final = "stateful"
"""Type of the layers of a config that names neither types of layers nor attention heads."""

# By the names of `layer_types` in configs, of every transformers release that is supported.
_KINDS: Final[Mapping[str, tuple[Kind, ...]]] = {
    "full_attention": (Kind.FULL,),
    "attention": (Kind.FULL,),
    "global": (Kind.FULL,),
    "local": (Kind.SLIDING,),
    "sliding_attention": (Kind.SLIDING,),
    "chunked_attention": (Kind.CHUNKED,),
    "linear_attention": (Kind.STATE,),
    "mamba": (Kind.STATE,),
    "conv": (Kind.STATE,),
    STATEFUL: (Kind.STATE,),
    "hybrid": (Kind.STATE, Kind.FULL),
    "hybrid_sliding": (Kind.STATE, Kind.SLIDING),
    "mlp": (),
    "moe": (),
}
# Fields that layers with a window have instead of the others'.
_OF_WINDOWS: Final = {
    "num_attention_heads": "swa_num_attention_heads",
    "num_key_value_heads": "swa_num_key_value_heads",
    "head_dim": "swa_head_dim",
    "v_head_dim": "swa_v_head_dim",
}
# Fields of a decoder alone whose config is one of encoders too, where the others' are an encoder's.
OF_DECODERS: Final = {
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "num_key_value_heads": "decoder_attention_heads",
}

_IN_CODE: Final = {"mimo_v2_flash": 2}
"""Factors on the KV heads of layers with a window, by model type, that stand in modelling code and in no config."""


def read_field(config: Any, name: str) -> Any:
    """A config field, or None; configs raise when layers differ in it and no layer is named."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def number(config: Any, name: str) -> int:
    """A positive whole number of a config, or 0."""
    value = read_field(config, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def run_again(config: Any) -> list[int]:
    """The layers of further runs, in the order of their caches, of models that run some layers several times."""
    first, count = number(config, "n_input_layers"), number(config, "n_recurrent_layers")
    if read_field(config, "recurrent_kv_cache_mode") != "per_loop":
        return []
    return list(range(first, first + count)) * (number(config, "n_recurrent_loops") - 1)


def layer_types(config: Any, each: Any, count: int) -> tuple[str, ...]:
    """The layers' types; without a list in the config, those that transformers' caches derive from windows."""
    given = list(read_field(config, "layer_types") or read_field(config, "attention_layers") or ())[:count]
    if given:
        return tuple(given + given[-1:] * (count - len(given)))
    distinct = {id(one): one for one in each}
    if not any(number(one, "num_attention_heads") for one in distinct.values()):  # RWKV, xLSTM
        return (STATEFUL,) * count
    derived = {
        key: "full_attention" if _window(one, Kind.SLIDING) is None else "sliding_attention"
        for key, one in distinct.items()
    }
    return tuple(derived[id(one)] for one in each)


def lists_layers(config: Any) -> bool:
    """Whether a config has lists with an entry per layer, or with layers' indices."""
    return any(read_field(config, name) for name in ("num_attention_heads_per_layer", "cross_attention_layers"))


def stores_of(config: Any, layer_type: str, index: int) -> tuple[Store, ...]:
    """The stores of a layer, by its own config."""
    if "attention" in (read_field(config, "skip") or ()):
        return ()
    if index in (read_field(config, "cross_attention_layers") or ()):  # which do not run without images
        return ()
    kinds = _KINDS.get(layer_type, (Kind.OTHER,))
    if read_field(config, "kv_lora_rank"):
        kinds = tuple(Kind.LATENT if kind in PER_TOKEN else kind for kind in kinds)
    stores = [_store(config, kind, index) for kind in kinds]
    if read_field(config, "add_cross_attention"):
        stores.append(_store(config, Kind.CROSS, index))
    return tuple(stores)


def _store(config: Any, kind: Kind, index: int) -> Store:
    if kind is Kind.STATE:
        if (own := own_code_of(type(config))) is not None and own.states is not None:
            states = own.states
            return Store(kind, states=states.count, continues=states.continues, segments=states.segments)
        count = number(config, "number_of_conv_states") or 1
        return Store(kind, states=count, continues=STATES_IN_CACHES.get(config.model_type, False))
    if kind is Kind.OTHER:
        return Store(kind)
    if kind is Kind.LATENT:
        latent, rotated = number(config, "kv_lora_rank"), number(config, "qk_rope_head_dim")
        return Store(kind, number(config, "num_attention_heads"), 1, latent + rotated, latent)
    window = _window(config, kind)
    if window is None and kind in (Kind.SLIDING, Kind.CHUNKED):
        kind = Kind.FULL
    elif kind is Kind.SLIDING and not (number(config, "sliding_window") or number(config, "window_size")):
        kind = Kind.CHUNKED
    heads, head_dim = _query_heads(config, kind, index), _head_dim(config, kind)
    value_dim = _size(config, kind, "v_head_dim") or head_dim
    return Store(kind, heads, _kv_heads(config, kind) or heads, head_dim, value_dim, window)


def _size(config: Any, kind: Kind, name: str) -> int:
    """A field of a layer's sizes, by its name in this kind of layer, in decoders, or in all configs; or 0."""
    own = number(config, _OF_WINDOWS[name]) if kind is Kind.SLIDING else 0
    return own or number(config, OF_DECODERS.get(name, name)) or number(config, name)


def _query_heads(config: Any, kind: Kind, index: int) -> int:
    if listed := read_field(config, "num_attention_heads_per_layer"):
        heads: int = listed[index]
        return heads
    return _size(config, kind, "num_attention_heads")


def _kv_heads(config: Any, kind: Kind) -> int:
    """KV heads of a layer; 0 for as many as query heads."""
    kv_heads = _size(config, kind, "num_key_value_heads")
    if kind is Kind.SLIDING:
        kv_heads *= _IN_CODE.get(config.model_type, 1)
    if not kv_heads and read_field(config, "new_decoder_architecture"):  # Falcon: `multi_query` then says nothing
        kv_heads = number(config, "num_kv_heads")
    # gpt_bigcode names the choice, not the number
    return kv_heads or int(bool(read_field(config, "multi_query")))


def _head_dim(config: Any, kind: Kind) -> int:
    heads = _size(config, kind, "num_attention_heads")
    given = _size(config, kind, "head_dim") or number(config, "kv_channels")
    return given or (number(config, "hidden_size") // heads if heads else 0)


def _window(config: Any, kind: Kind) -> int | None:
    """The window of a layer with one, in tokens; None when the config names none, or one of no tokens."""
    if kind not in (Kind.SLIDING, Kind.CHUNKED):
        return None
    names = ("sliding_window", "window_size", "attention_chunk_size")
    sizes = (number(config, name) for name in (names if kind is Kind.SLIDING else names[::-1]))
    return next(filter(None, sizes), None)


ENCODER_DECODERS: Final = frozenset(
    {
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "m2m_100", "marian", "mbart", "mvp"),
        *("nllb-moe", "pegasus", "pegasus_x", "plbart"),
        *("longt5", "mt5", "switch_transformers", "t5", "t5gemma", "umt5"),
        *("moonshine", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "speecht5", "whisper"),
        *("encoder-decoder", "florence2", "speech-encoder-decoder", "vision-encoder-decoder"),
        *("slim_bart", "slim_t5", "slim_whisper"),
    }
)
"""Model types whose decoders find the encoder's keys and values in transformers' `EncoderDecoderCache`, and hand them
to an attention function, or have overrides that do. Each was compared with stock."""

OTHER_ENCODER_DECODERS: Final[Mapping[str, str]] = {
    "fsmt": "its decoder takes tokens before rows, and hides padding by masks of its own",
    "prophetnet": "its decoder predicts several tokens in streams, each with attention of its own",
    "t5gemma2": "its decoder attends to its own tokens and to the encoder's in one softmax",
}
"""Why others run stock."""

LEAVES_TOKENS_OUT: Final = "its experts leave out tokens beyond a capacity that all rows of a pass have together"
"""Why a model runs stock for which `leaves_tokens_out` is true."""


def leaves_tokens_out(config: PreTrainedConfig) -> bool:
    """Whether what a row computes depends on the other rows of its pass, so that a row run once is not what stock has.

    NLLB-MoE's experts take so large a share of a pass's tokens, and by default all of them.
    """
    if config.model_type != "nllb-moe":
        return False
    share: float = config.moe_eval_capacity_token_fraction
    return share < 1  # from 0 down, the capacity is one of its own


STATES_IN_CACHES: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba"), False),
    **dict.fromkeys(("bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lara_mini"), True),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm2_vl", "lfm3", "lfm3_vl", "mamba2"), True),
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), True),
    **dict.fromkeys(("nemo_speechlm", "nemotron_h", "nemotron_h_omni", "olmo_hybrid"), True),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), True),
    **dict.fromkeys(("zamba2", "zaya"), True),
}
"""Model types that store all states in transformers' cache, and whose attention layers, if any, call its interface.

Each was compared with stock. The value says whether a pass of several tokens continues from a stored state, which
Mamba-1 scans ignore.
"""

_INKLING: Final = ("inkling_mm_model", "inkling_text")
_INKLING_2: Final = ("inkling2", "inkling2_text", "inkling2_loop", "inkling2_loop_text")

STATES_NOT_SHARED: Final[Mapping[str, str]] = {
    "blt": "it groups the bytes of whole rows into patches by another model, in every pass",
    "git": "its steps count the tokens of an image before each prompt, also of text alone (GitModel.forward)",
    **dict.fromkeys((*_INKLING, *_INKLING_2), "each of its queries adds a bias of its own to each distance's scores"),
    "rwkv": "transformers mixes the rows of a batch in its steps, so that a row's tokens depend on the others "
    "(RwkvSelfAttention.extract_key_value)",
    **dict.fromkeys(
        ("voxtral_realtime", "voxtral_realtime_text"), "each of its steps adds another part of the sound to its token"
    ),
}
"""Model types that run stock for another reason than where they keep states."""
