"""The layers of a model, what each stores for later tokens by its config and modules, and a cache's layers.

Layers of one model may differ in kind, heads, widths and windows, and some store nothing. Nothing else in this package
reads a config for that, and no layer stands for all others.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final
from weakref import ref

from torch import Tensor, nn
from transformers import PreTrainedModel

from .._compat import is_fsdp2, local_part
from ..attention.overrides import OwnCode, overrides_of, own_code_of
from ..errors import Unsupported
from .layers.attention import REMEDY, PlainLayer, SharedContextLayer, other_heads
from .layers.latent import ExpandsLatents, LatentStorage
from .layers.own import AttendsByItself, OwnStorage
from .layers.state import StateAndAttentionLayer, StateLayer
from .state import SharedState
from .storage import TokenStorage
from .stores import (
    OF_DECODERS,
    PER_TOKEN,
    Kind,
    Store,
    layer_types,
    lists_layers,
    number,
    read_field,
    run_again,
    stores_of,
)


@dataclass(frozen=True)
class ModelLayout:
    """The stores of each layer of a model.

    Attributes:
        layers: For each layer its stores: none, one, or several. Behind them, those of layers that run again over a
            cache of their own.
        types: For each layer its name in the config's ``layer_types``, given or derived.
        own: Layers that attend by themselves, by index; of a model only. Configs name them in a property,
            ``layers_that_attend_by_themselves``.
        expanding: Layers that make keys and values of latents, by index; of a model only, and where overrides know
            them.
    """

    model_type: str
    layers: tuple[tuple[Store, ...], ...]
    types: tuple[str, ...]
    own: Mapping[int, AttendsByItself] = field(default_factory=dict)
    expanding: Mapping[int, ExpandsLatents] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Any) -> ModelLayout:
        """Read the layout of a config's decoder; never fails, see `Store` for what the config does not say."""
        text, encoded = config.get_text_config(decoder=True), bool(read_field(config, "is_encoder_decoder"))
        if encoded and text is not config and type(text) is type(config):
            for name in OF_DECODERS.values():  # in the copy for a decoder they have defaults
                if (value := read_field(config, name)) is not None:
                    setattr(text, name, value)
        count = number(config, "num_decoder_layers") if encoded else 0
        count = count or number(text, OF_DECODERS["num_hidden_layers"]) or number(text, "num_hidden_layers")
        differ = getattr(text, "is_heterogeneous", False)  # layers have configs of their own
        each = list(text.per_layer_config) if differ else [text] * count
        types = layer_types(text, each, count)
        borrowing = min(count, number(text, "num_kv_shared_layers"))
        made: dict[tuple[int, str, int | None], tuple[Store, ...]] = {}  # most layers are alike; reading takes time
        layers = []
        by_index = {key: lists_layers(one) for key, one in {id(one): one for one in each}.items()}
        for index, (one, kind) in enumerate(zip(each, types, strict=True)):
            key = id(one), kind, index if by_index[id(one)] else None
            if key not in made:
                made[key] = stores_of(one, kind, index)
            layers.append(made[key])
        if borrowing:
            layers[count - borrowing :] = [()] * borrowing
        for index in read_field(text, "layers_that_attend_by_themselves") or ():
            layers[index] = tuple(map(_own, layers[index]))
        if encoded:
            layers = [_with_cross(stores) for stores in layers]
        again = run_again(text)
        layers, types = layers + [layers[index] for index in again], (*types, *(types[index] for index in again))
        return cls(config.model_type, tuple(layers), types)

    @classmethod
    def of(cls, model: PreTrainedModel, modules: Iterable[nn.Module] | None = None) -> ModelLayout:
        """The layout of a model, of these modules, with heads as its layers have them here, and its own layers."""
        found = cls.from_config(model.config)
        layers, own, expanding = list(found.layers), dict[int, AttendsByItself](), dict[int, ExpandsLatents]()
        plan = getattr(model, "tp_plan", None) or {}  # by modules' names, whose last part tells projections apart
        whole = frozenset(name.rpartition(".")[2] for name, style in plan.items() if style != "colwise")
        keeping = dict[int, list[nn.Module]]()
        if is_fsdp2(model.modules() if modules is None else modules):  # which gathers them for each pass
            whole = _PROJECTIONS
        for index, module in _layer_modules(model, modules):
            if index not in range(len(layers)):
                continue
            if keeps_state(type(module)):
                keeping.setdefault(index, []).append(module)
            if getattr(module, "attends_by_itself", False):
                own[index] = module
            elif "expand_kv" in overrides_of(type(module)):
                expanding[index] = module
                layers[index] = _with_heads_of_latents(module, layers[index], whole)
            elif sum(store.kind in PER_TOKEN for store in layers[index]) == 1:
                layers[index] = tuple(
                    with_heads_of(module, store, whole) if store.kind in PER_TOKEN else store
                    for store in layers[index]
                )
        for index, those in keeping.items():
            layers[index] = _in_segments(layers[index], those)
        if again := run_again(model.config.get_text_config(decoder=True)):
            layers[-len(again) :] = [layers[index] for index in again]
        if (code := own_code_of(type(model))) is not None:
            layers = [tuple(_as_stored(store, code, model.config) for store in stores) for stores in layers]
        return replace(found, layers=tuple(layers), own=own, expanding=expanding)

    def __iter__(self) -> Iterator[tuple[int, Store]]:
        return ((index, store) for index, stores in enumerate(self.layers) for store in stores)

    @cached_property
    def per_token(self) -> dict[int, Store]:
        return {index: store for index, store in self if store.kind in PER_TOKEN}

    @cached_property
    def states(self) -> dict[int, Store]:
        return {index: store for index, store in self if store.kind is Kind.STATE}

    @cached_property
    def cross(self) -> dict[int, Store]:
        return {index: store for index, store in self if store.kind is Kind.CROSS}

    @property
    def shared(self) -> dict[int, Store]:
        """By layer, the stores whose tokens rows share: of another sequence where there is one, else of prompts."""
        return self.cross or self.per_token

    @property
    def packs(self) -> bool:
        """Whether passes may have the tokens of several prompts end to end in one row, see `Store.packs`."""
        return all(store.packs for _, store in self)

    @property
    def beyond_tokens(self) -> bool:
        """Whether layers store more than something for each token: a state, or what is of another sequence."""
        return bool(self.states) or bool(self.cross)

    @property
    def continues_states(self) -> bool:
        """Whether passes of several tokens are known to continue from states."""
        return all(store.continues for store in self.states.values())

    @cached_property
    def distinct(self) -> Counter[Store]:
        """The distinct stores with keys and values of every token, with the count of their layers."""
        return Counter(self.per_token.values())

    @property
    def smallest_window(self) -> int | None:
        return min((store.window for _, store in self if store.window is not None), default=None)

    @property
    def attends_by_itself(self) -> bool:
        """Whether all layers do that store keys and values."""
        return bool(self.own) and self.own.keys() == self.per_token.keys()


_READ_STATES: Final = frozenset({"update_conv_state", "update_recurrent_state"})
"""Methods of transformers' caches, one of which each module calls that keeps states there."""


def keeps_state(module: type[nn.Module]) -> bool:
    """Whether the `forward` of a class itself reads and updates states in transformers' cache."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and not _READ_STATES.isdisjoint(code.co_names)


_BEFORE_STATES: Final = ("in_proj", "q_proj", "k_proj", "v_proj")
"""Prefixes of the names of projections whose outputs convolutions keep."""


def _in_segments(stores: tuple[Store, ...], modules: list[nn.Module]) -> tuple[Store, ...]:
    """A layer's stores, whose states run over segments where one of its modules keeps them all, without a bias before.

    Projections add a bias to padding too, which enters states then, where its zeros would not.
    """
    before = (child for name, child in modules[0].named_children() if name.startswith(_BEFORE_STATES))
    if len(modules) > 1 or any(getattr(child, "bias", None) is not None for child in before):
        return stores
    return tuple(replace(store, segments=True) if store.kind is Kind.STATE else store for store in stores)


def _layer_modules(model: PreTrainedModel, modules: Iterable[nn.Module] | None) -> Iterator[tuple[int, Any]]:
    """The modules of a decoder that know the index of their layer, with it."""
    every: Iterable[Any] = model.modules() if modules is None else modules
    if model.config.is_encoder_decoder and (decoder := model.get_decoder()) is not None:
        every = decoder.modules()  # an encoder's layers have the same indices
    for module in list(every):
        index = module.__dict__.get("layer_idx")
        if isinstance(index, int):
            yield index, module


def _with_heads_of_latents(module: Any, stores: tuple[Store, ...], whole: frozenset[str]) -> tuple[Store, ...]:
    """A layer's stores with the query heads that its projection of latents has on this device."""
    part, outputs = part_here(module.kv_b_proj, whole="kv_b_proj" in whole)
    return tuple(
        replace(store, query_heads=store.query_heads * part // outputs) if store.kind is Kind.LATENT else store
        for store in stores
    )


def _as_stored(store: Store, code: OwnCode, config: Any) -> Store:
    """The store with the widths that overrides store."""
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


_FUSED: Final = ("query_key_value", "qkv_proj")
"""Names of projections to queries, keys and values at once."""

_PROJECTIONS: Final = frozenset((*_FUSED, "k_proj", "v_proj", "kv_b_proj"))


def with_heads_of(module: nn.Module, store: Store, whole: frozenset[str]) -> Store:
    """The store with the heads that a layer's own projections have: its code, or tensor parallelism, may differ.

    `whole` names projections whose outputs each process has whole, although it computes only its part of them.
    """
    for name in _FUSED:
        part, outputs = part_here(getattr(module, name, None), whole=name in whole)
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
        part, outputs = part_here(k_proj, whole="k_proj" in whole)
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
    part, outputs = part_here(projection, whole=whole)
    return int(getattr(projection, "out_features", 0)) * part // outputs


def part_here(projection: Any, *, whole: bool) -> tuple[int, int]:
    """How many of a projection's outputs this process has, and of how many; as many but with tensor parallelism."""
    while isinstance(beneath := getattr(projection, "base_layer", None), nn.Module):  # an adapter
        projection = beneath
    # By ZeRO-3, attributes are gathered in passes of an engine: by one process alone, the others would wait.
    weight = getattr(projection, "_parameters", {}).get("weight")
    if whole or not isinstance(weight, Tensor) or (local := local_part(weight)) is weight:
        return 1, 1
    return local.shape[0], weight.shape[0]


class EmptyLayer(PlainLayer):
    """Takes the place of a layer that stores nothing, so that the others keep their indices."""

    def __init__(self, state: SharedState):
        super().__init__()
        self.state = state
        self.ran: dict[str, str] = {}

    def captured(self, state: SharedState, buffers: Iterator[Any]) -> EmptyLayer:
        return self

    def for_nodes_of(self, state: SharedState) -> EmptyLayer:
        return EmptyLayer(state)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse tokens, as `SharedContextCache.update` does before with a better message."""
        raise TypeError("this cache layer stores nothing")

    def reset(self) -> None:
        """No-op: there are no tokens."""


CacheLayer = SharedContextLayer | StateLayer | EmptyLayer


def layers_of(layout: ModelLayout, state: SharedState, held: Sequence[CacheLayer]) -> list[CacheLayer]:
    """The layers of a cache for a model: new ones, or those held; ValueError if these have tokens of other layers."""
    if held and len(held) != len(layout.layers):
        raise ValueError(f"the cache holds {len(held)} layers, the model has {len(layout.layers)}; {REMEDY}")
    return [_layer_of(layout, state, index, held[index] if held else None) for index in range(len(layout.layers))]


def _layer_of(layout: ModelLayout, state: SharedState, index: int, held: CacheLayer | None) -> CacheLayer:
    store, state_store = layout.per_token.get(index), layout.states.get(index)
    if held is not None and isinstance(held, StateLayer) is (state_store is None):
        raise ValueError(f"the cache and the model differ in whether layer {index} stores a state; {REMEDY}")
    if store is not None:
        layer = _attention_layer(layout, state, index, held if isinstance(held, SharedContextLayer) else None)
        layer.store = store
        return layer
    if isinstance(held, SharedContextLayer):
        raise ValueError(f"the cache holds tokens of layer {index}, where the model stores none; {REMEDY}")
    if state_store is None:
        return EmptyLayer(state)
    return StateLayer(state, state_store) if held is None else held


def _attention_layer(
    layout: ModelLayout, state: SharedState, index: int, held: SharedContextLayer | None
) -> SharedContextLayer:
    """The layer held, or a new one for keys and values of every token."""
    store, state_store = layout.per_token[index], layout.states.get(index)
    if held is not None:
        _check_heads(held, store)
        layer = held
    elif state_store is None:
        layer = SharedContextLayer(state, index, store, _storage(layout, index))
    else:
        layer = StateAndAttentionLayer(state, index, store, state_store, _storage(layout, index))
    # A cache that was loaded or copied has no layers of a model, or those of another one.
    if isinstance(layer.storage, OwnStorage) and (own := layout.own.get(index)) is not None:
        layer.storage.layer = ref(own)
    if isinstance(layer.storage, LatentStorage):
        layer.storage.layer = ref(layout.expanding[index])
    return layer


def _check_heads(layer: SharedContextLayer, store: Store) -> None:
    """Raise ValueError if a layer holds tokens of other heads or widths than a store has, where these are known."""
    if (node := layer.storage.node_example) is None:
        return
    widths = (store.head_dim, store.value_dim)
    if store.kind is Kind.LATENT:
        widths = (store.value_dim, store.head_dim - store.value_dim)
    for part, width in zip(node, widths, strict=True):
        got = part.shape[-3], part.shape[-1]
        if 0 not in (store.kv_heads, width) and got != (store.kv_heads, width):
            raise ValueError(other_heads(got, (store.kv_heads, width)))


def _storage(layout: ModelLayout, index: int) -> TokenStorage | None:
    """A storage for what a layer's own code makes of its tokens; None for keys and values as they come."""
    if (own := layout.own.get(index)) is not None:
        return OwnStorage(ref(own))
    expanding = layout.expanding.get(index)
    return None if expanding is None else LatentStorage(ref(expanding), layout.per_token[index].kernel_heads)
