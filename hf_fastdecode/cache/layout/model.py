"""What each layer of a model stores for later tokens: read once, from its config and its modules.

Layers of one model may differ in kind, heads, widths and windows, and some store nothing. Nothing else in this package
reads a config for that, and no layer stands for all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...attention.own_code import OwnCode, own_code_of, stand_ins_of
from ..layers.latent import ExpandsLatents
from ..layers.own import AttendsByItself
from .config_fields import OF_DECODERS, layer_types, lists_layers, number, read_field, run_again, stores_of
from .module_heads import part_here, with_heads_of
from .stores import PER_TOKEN, Kind, Store


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
                part, outputs = part_here(module.kv_b_proj, whole="kv_b_proj" in whole)
                layers[index] = tuple(
                    replace(store, query_heads=store.query_heads * part // outputs)
                    if store.kind is Kind.LATENT
                    else store
                    for store in layers[index]
                )
            elif sum(store.kind in PER_TOKEN for store in layers[index]) == 1:
                layers[index] = tuple(
                    with_heads_of(module, store, whole) if store.kind in PER_TOKEN else store
                    for store in layers[index]
                )
        if again := run_again(model.config.get_text_config(decoder=True)):
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
