"""What each layer of a model stores for later tokens: read once, from its config and its modules.

Layers of one model may differ in kind, heads, widths and windows, and some store nothing. Nothing else in this package
reads a config for that, and no layer stands for all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Final

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..attention.own_code import OwnCode, own_code_of, stand_ins_of
from ..errors import Unsupported
from ..parallel.groups import local_part
from .layers.latent import ExpandsLatents, kv_heads_of_kernels
from .layers.own import AttendsByItself
from .states_in_caches import STATES_IN_CACHES


class Kind(StrEnum):
    """What a store holds.

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
# Fields that layers with a window have in the place of the others'.
_OF_WINDOWS: Final = {
    "num_attention_heads": "swa_num_attention_heads",
    "num_key_value_heads": "swa_num_key_value_heads",
    "head_dim": "swa_head_dim",
    "v_head_dim": "swa_v_head_dim",
}
# Fields of a decoder alone whose config is one of encoders too, where the others' are an encoder's.
_OF_DECODERS: Final = {
    "num_hidden_layers": "decoder_layers",
    "num_attention_heads": "decoder_attention_heads",
    "num_key_value_heads": "decoder_attention_heads",
}

_FUSED: Final = ("query_key_value", "qkv_proj")
"""Names of projections to queries, keys and values at once."""

_IN_CODE: Final = {"mimo_v2_flash": 2}
"""Factors on the KV heads of layers with a window, by model type, that stand in modelling code and in no config."""


@dataclass(frozen=True)
class Store:
    """What a layer stores in one place. Sizes are 0 where the config does not say them.

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
        stock_numbers: Numbers of a token in transformers' cache, where these are other than `numbers`.
    """

    kind: Kind
    query_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    states: int = 0
    continues: bool = False
    biased: bool = False
    stock_numbers: int = 0

    @property
    def kernel_heads(self) -> int:
        """KV heads as decode kernels see them."""
        return kv_heads_of_kernels(self.query_heads) if self.kind is Kind.LATENT else self.kv_heads

    @property
    def group_size(self) -> int:
        """Query heads per KV head; 1 where the config does not say it."""
        return max(1, self.query_heads // self.kv_heads) if self.kv_heads else 1

    @property
    def attention(self) -> str:
        """``MHA``, ``GQA`` or ``MQA``."""
        if self.kv_heads == self.query_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def numbers(self) -> int:
        """Numbers of a token's keys and values."""
        if self.kind is Kind.LATENT:
            return self.head_dim
        return self.kv_heads * (self.head_dim + self.value_dim)

    def stock_bytes(self, stored: int) -> int:
        """Bytes of a token in transformers' cache, of which `stored` are stored here."""
        return stored * self.stock_numbers // self.numbers if self.stock_numbers else stored


@dataclass(frozen=True)
class ModelLayout:
    """What each layer of a model stores.

    Attributes:
        model_type: transformers' name of the architecture.
        layers: For each layer its stores: none, one, or several. Behind them, those of layers that run again over a
            cache of their own.
        types: For each layer its name in the config's ``layer_types``, given or derived.
        borrowing: Number of last layers that read what others store.
        own: Layers that attend by themselves, by index; of a model only. Configs name them in a property,
            ``layers_that_attend_by_themselves``.
        expanding: Layers that make keys and values of latents, by index; of a model only, and where stand-ins know
            them.
    """

    model_type: str
    layers: tuple[tuple[Store, ...], ...]
    types: tuple[str, ...]
    borrowing: int = 0
    own: Mapping[int, AttendsByItself] = field(default_factory=dict)
    expanding: Mapping[int, ExpandsLatents] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Any) -> ModelLayout:
        """Read the layout of a config's decoder; never fails, see `Store` for what the config does not say."""
        text, encoded = config.get_text_config(decoder=True), bool(_field(config, "is_encoder_decoder"))
        if encoded and text is not config and type(text) is type(config):
            for name in _OF_DECODERS.values():  # in the copy for a decoder they have defaults
                if (value := _field(config, name)) is not None:
                    setattr(text, name, value)
        count = _number(config, "num_decoder_layers") if encoded else 0
        count = count or _number(text, _OF_DECODERS["num_hidden_layers"]) or _number(text, "num_hidden_layers")
        differ = getattr(text, "is_heterogeneous", False)  # layers have configs of their own
        each = list(text.per_layer_config) if differ else [text] * count
        types = _types(text, each, count)
        borrowing = min(count, _number(text, "num_kv_shared_layers"))
        made: dict[tuple[int, str, int | None], tuple[Store, ...]] = {}  # most layers are alike; reading takes time
        layers = []
        by_index = {key: _lists_layers(one) for key, one in {id(one): one for one in each}.items()}
        for index, (one, kind) in enumerate(zip(each, types, strict=True)):
            key = id(one), kind, index if by_index[id(one)] else None
            if key not in made:
                made[key] = _stores(one, kind, index)
            layers.append(made[key])
        if borrowing:
            layers[count - borrowing :] = [()] * borrowing
        for index in _field(text, "layers_that_attend_by_themselves") or ():
            layers[index] = tuple(map(_own, layers[index]))
        if encoded:
            layers = [_with_cross(stores) for stores in layers]
        again = _run_again(text)
        layers, types = layers + [layers[index] for index in again], (*types, *(types[index] for index in again))
        return cls(config.model_type, tuple(layers), types, borrowing)

    @classmethod
    def of(cls, model: PreTrainedModel, modules: Iterable[nn.Module] | None = None) -> ModelLayout:
        """The layout of a model, with heads as its layers have them on this device, and its own layers.

        `modules` are the model's, where the caller has them already.
        """
        found = cls.from_config(model.config)
        layers, own, expanding = list(found.layers), dict[int, AttendsByItself](), dict[int, ExpandsLatents]()
        plan = getattr(model, "tp_plan", None) or {}  # by modules' names, whose last part tells projections apart
        whole = frozenset(name.rpartition(".")[2] for name, style in plan.items() if style != "colwise")
        every: Iterable[Any] = model.modules() if modules is None else modules
        if model.config.is_encoder_decoder and (decoder := model.get_decoder()) is not None:
            every = decoder.modules()  # an encoder's layers have the same indices
        for module in [module for module in every if "layer_idx" in module.__dict__]:
            index = module.__dict__["layer_idx"]
            if not isinstance(index, int) or not 0 <= index < len(layers):
                continue
            if getattr(module, "attends_by_itself", False):
                own[index] = module
            elif "expand_kv" in stand_ins_of(type(module)):
                expanding[index] = module
                part, outputs = _part(module.kv_b_proj, whole="kv_b_proj" in whole)
                layers[index] = tuple(
                    replace(store, query_heads=store.query_heads * part // outputs)
                    if store.kind is Kind.LATENT
                    else store
                    for store in layers[index]
                )
            elif sum(store.kind in PER_TOKEN for store in layers[index]) == 1:
                layers[index] = tuple(
                    _with_heads_of(module, store, whole) if store.kind in PER_TOKEN else store
                    for store in layers[index]
                )
        if again := _run_again(model.config.get_text_config(decoder=True)):
            layers[-len(again) :] = [layers[index] for index in again]
        if (code := own_code_of(type(model))) is not None:
            layers = [tuple(_as_stored(store, code, model.config) for store in stores) for stores in layers]
        return replace(found, layers=tuple(layers), own=own, expanding=expanding)

    def __iter__(self) -> Iterator[tuple[int, Store]]:
        """Each store with the index of its layer."""
        return ((index, store) for index, stores in enumerate(self.layers) for store in stores)

    @cached_property
    def per_token(self) -> dict[int, Store]:
        """By layer, the stores with keys and values of every token."""
        return {index: store for index, store in self if store.kind in PER_TOKEN}

    @cached_property
    def states(self) -> dict[int, Store]:
        """By layer, the stores with a state per row."""
        return {index: store for index, store in self if store.kind is Kind.STATE}

    @cached_property
    def cross(self) -> dict[int, Store]:
        """By layer, the stores with keys and values of another sequence."""
        return {index: store for index, store in self if store.kind is Kind.CROSS}

    @property
    def prefills_by_rows(self) -> bool:
        """Whether what layers store is computed for whole prompts only, each a row of its own."""
        return bool(self.states) or bool(self.cross)

    @property
    def continues_states(self) -> bool:
        """Whether passes of several tokens are known to continue from states."""
        return all(store.continues for store in self.states.values())

    @cached_property
    def distinct(self) -> Counter[Store]:
        """The distinct stores with keys and values of every token, with their numbers of layers."""
        return Counter(self.per_token.values())

    @property
    def smallest_window(self) -> int | None:
        """The smallest window of any layer; None if no layer has one."""
        return min((store.window for _, store in self if store.window is not None), default=None)

    @property
    def attends_by_itself(self) -> bool:
        """Whether all layers do that store keys and values."""
        return bool(self.own) and self.own.keys() == self.per_token.keys()


def _run_again(config: Any) -> list[int]:
    """The layers of further runs, in the order of their caches, of models that run some layers several times."""
    first, count = _number(config, "n_input_layers"), _number(config, "n_recurrent_layers")
    if _field(config, "recurrent_kv_cache_mode") != "per_loop":
        return []
    return list(range(first, first + count)) * (_number(config, "n_recurrent_loops") - 1)


def _types(config: Any, each: Any, count: int) -> tuple[str, ...]:
    """The layers' types; without a list in the config, those that transformers' caches derive from windows."""
    given = list(_field(config, "layer_types") or _field(config, "attention_layers") or ())[:count]
    if given:
        return tuple(given + given[-1:] * (count - len(given)))
    distinct = {id(one): one for one in each}
    if not any(_number(one, "num_attention_heads") for one in distinct.values()):  # RWKV, xLSTM
        return (STATEFUL,) * count
    derived = {
        key: "full_attention" if _window(one, Kind.SLIDING) is None else "sliding_attention"
        for key, one in distinct.items()
    }
    return tuple(derived[id(one)] for one in each)


def _lists_layers(config: Any) -> bool:
    """Whether a config has lists with an entry per layer, or with layers' indices."""
    return any(_field(config, name) for name in ("num_attention_heads_per_layer", "cross_attention_layers"))


def _stores(config: Any, layer_type: str, index: int) -> tuple[Store, ...]:
    """What a layer stores, by its own config."""
    if "attention" in (_field(config, "skip") or ()):
        return ()
    if index in (_field(config, "cross_attention_layers") or ()):  # which do not run without images
        return ()
    kinds = _KINDS.get(layer_type, (Kind.OTHER,))
    if _field(config, "kv_lora_rank"):
        kinds = tuple(Kind.LATENT if kind in PER_TOKEN else kind for kind in kinds)
    stores = [_store(config, kind, index) for kind in kinds]
    if _field(config, "add_cross_attention"):
        stores.append(_store(config, Kind.CROSS, index))
    return tuple(stores)


def _store(config: Any, kind: Kind, index: int) -> Store:
    if kind is Kind.STATE:
        if (own := own_code_of(type(config))) is not None and own.states is not None:
            return Store(kind, states=own.states.count, continues=own.states.continues)
        count = _number(config, "number_of_conv_states") or 1
        return Store(kind, states=count, continues=STATES_IN_CACHES.get(config.model_type, False))
    if kind is Kind.OTHER:
        return Store(kind)
    if kind is Kind.LATENT:
        latent, rest = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
        return Store(kind, _number(config, "num_attention_heads"), 1, latent + rest, latent)
    window = _window(config, kind)
    if window is None and kind in (Kind.SLIDING, Kind.CHUNKED):
        kind = Kind.FULL
    elif kind is Kind.SLIDING and not (_number(config, "sliding_window") or _number(config, "window_size")):
        kind = Kind.CHUNKED

    def size(name: str) -> int:
        own = _number(config, _OF_WINDOWS[name]) if kind is Kind.SLIDING else 0
        return own or _number(config, _OF_DECODERS.get(name, name)) or _number(config, name)

    listed = _field(config, "num_attention_heads_per_layer")
    heads = listed[index] if listed else size("num_attention_heads")
    kv_heads = size("num_key_value_heads") * (_IN_CODE.get(config.model_type, 1) if kind is Kind.SLIDING else 1)
    if not kv_heads and _field(config, "new_decoder_architecture"):  # Falcon, where `multi_query` then says nothing
        kv_heads = _number(config, "num_kv_heads")
    if not kv_heads:  # gpt_bigcode names the choice, not the number
        kv_heads = 1 if _field(config, "multi_query") else heads
    hidden = _number(config, "hidden_size")
    head_dim = size("head_dim") or _number(config, "kv_channels")
    head_dim = head_dim or (hidden // size("num_attention_heads") if size("num_attention_heads") else 0)
    return Store(kind, heads, kv_heads, head_dim, size("v_head_dim") or head_dim, window)


def _window(config: Any, kind: Kind) -> int | None:
    """The window of a layer with one, in tokens; None when the config names none, or one of no tokens."""
    if kind not in (Kind.SLIDING, Kind.CHUNKED):
        return None
    names = ("sliding_window", "window_size", "attention_chunk_size")
    sizes = (_number(config, name) for name in (names if kind is Kind.SLIDING else names[::-1]))
    return next(filter(None, sizes), None)


def _as_stored(store: Store, code: OwnCode, config: Any) -> Store:
    """The store with the widths that stand-ins store."""
    if store.kind not in PER_TOKEN:
        return store
    key, value = code.widths(config, store.head_dim, store.value_dim)
    stock = store.numbers * (store.group_size if code.repeats_heads(config) else 1)
    stored = replace(store, head_dim=key, value_dim=value, biased=code.adds_biases)
    return stored if stock == stored.numbers else replace(stored, stock_numbers=stock)


def _with_cross(stores: tuple[Store, ...]) -> tuple[Store, ...]:
    """The stores of a decoder layer with those of its cross attention, whose heads are those of its self-attention."""
    if not stores or stores[-1].kind is Kind.CROSS:
        return stores
    return (*stores, replace(stores[0], kind=Kind.CROSS, window=None))


def _own(store: Store) -> Store:
    return replace(store, kind=Kind.OWN) if store.kind in PER_TOKEN else store


def _with_heads_of(module: nn.Module, store: Store, whole: frozenset[str]) -> Store:
    """The store with the heads that a layer's own projections have: its code, or tensor parallelism, may differ.

    `whole` names projections whose outputs each process has whole, although it computes only its part of them.
    """
    for name in _FUSED:
        part, outputs = _part(getattr(module, name, None), whole=name in whole)
        if part != outputs:
            if store.query_heads * part % outputs or store.kv_heads * part % outputs:
                raise Unsupported(
                    f"this process has {part} of the {outputs} outputs of {name}, which are no whole part of the "
                    f"layer's {store.query_heads} query heads and {store.kv_heads} KV heads"
                )
            heads, kv_heads = store.query_heads * part // outputs, store.kv_heads * part // outputs
            return replace(store, query_heads=heads, kv_heads=kv_heads)
    keys = _outputs(k_proj := getattr(module, "k_proj", None), whole="k_proj" in whole)
    values = _outputs(getattr(module, "v_proj", None), whole="v_proj" in whole)
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int) or head_dim < 1 or (not keys and not getattr(k_proj, "out_features", 0)):
        return store
    if not keys or keys % head_dim:
        part, outputs = _part(k_proj, whole="k_proj" in whole)
        if part != outputs:
            raise Unsupported(
                f"this process has {part} of the {outputs} outputs of k_proj, which are no whole number of KV heads "
                f"of {head_dim}",
                "split the model between as many processes as it has KV heads at most, or its other layers only, see "
                "hf_fastdecode.sequence_parallel_plan",
            )
        return store
    kv_heads = keys // head_dim
    heads = kv_heads * (getattr(module, "num_key_value_groups", None) or store.group_size)
    value_dim = values // kv_heads or head_dim  # some layers have no projection of values, which are their keys
    if (heads, kv_heads, head_dim, value_dim) == (store.query_heads, store.kv_heads, store.head_dim, store.value_dim):
        return store
    return replace(store, query_heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)


def _outputs(projection: Any, *, whole: bool) -> int:
    """Outputs of a projection on this device; 0 if it is none."""
    part, outputs = _part(projection, whole=whole)
    return int(getattr(projection, "out_features", 0)) * part // outputs


def _part(projection: Any, *, whole: bool) -> tuple[int, int]:
    """How many of a projection's outputs this process has, and of how many; as many but with tensor parallelism."""
    weight = getattr(projection, "weight", None)
    if whole or not isinstance(weight, Tensor) or (local := local_part(weight)) is weight:
        return 1, 1
    return local.shape[0], weight.shape[0]


def _field(config: Any, name: str) -> Any:
    """A config field, or None; configs raise when layers differ in it and no layer is named."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return None


def _number(config: Any, name: str) -> int:
    """A positive whole number of a config, or 0."""
    value = _field(config, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
