"""Which code attends in forward passes over a shared-context cache: our attention function, or overrides.

Inside `active`, configs name the functions that `interface` registers with transformers, and the longest row is known.
Most attention classes hand what ``update`` returned to the function that their config names. Some compute with it
themselves. Such an architecture registers methods that stand in for its own in these passes, and what else differs
(`OwnCode`, by ``patches``). A missing flag alone (``_supports_attention_backend``) is an entry without methods.
Likewise what keeps passes from being captured, or tokens from being packed, may have an override, and code that keeps
states elsewhere than in the cache (`OwnStates`).

Under `torch.autocast` this package casts by itself: autocast casts inputs of PyTorch's public functions, but neither
those of ``torch.ops.aten`` operators and of kernels, nor keys and values that a cache stores.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .._compat import ATTENTION_FIELD, setting
from ..errors import Unsupported
from ..instance_methods import Change, Switch
from .kv import SharedKV

Method = Callable[..., Any]
"""Called with the module first, then with the arguments of the method that it stands in for."""

_HOME: Final = "transformers.models."


@dataclass(frozen=True)
class OwnStates:
    """States that an architecture keeps outside of transformers' caches.

    Overrides take them from a layer of the cache (`kept_states` of `cache.layers.state.LayerOfOwnStates`), run the
    architecture's own code on them, and give back those after the pass (`keep_states`).

    Attributes:
        count: States of each layer that has any.
        continues: Whether a pass of several tokens continues from them.
        segments: Whether overrides run each segment of a packed row by itself (`StateLayer.by_segments`); not where
            padding changes states.
        beams: Whether transformers runs beam search with its own cache of them; where not, it raises.
    """

    count: int
    continues: bool = False
    segments: bool = False
    beams: bool = True


@dataclass(frozen=True)
class OwnCode:
    """Overrides and properties that an architecture needs beyond the attention interface.

    Attributes:
        overrides: Class name -> method name -> method.
        in_captures: The same of methods that run in captured passes alone; the architecture's own run in eager ones.
        reads_masks: Whether its code reads masks where nothing is hidden, or asks that they are made for what it adds
            to them, which overrides add instead; overrides pass windows to `interface.attend_shared`.
        takes_no_positions: Whether keys are biased by their distance, and ``forward`` takes no positions.
        ignores_positions: By config, whether ``forward`` takes positions that nothing reads but its overrides.
        counts_padding: Whether its code counts positions by the slots of the cache, those of padding included, and
            ``forward`` names none; it hands them on, or overrides read those of the pass.
        places_tokens: Whether its code derives positions from the ids of a whole prompt; passes are given none, and
            prompts run by rows.
        hands_generate_on: By the named arguments of a call, whether the class's own ``generate`` hands it to
            transformers', with all further arguments.
        scales_from: By config, the length from which attention scales with slots of the padded cache, if it does;
            overrides scale with positions, so that longer rows with padding run stock.
        compares_name: Whether its attention code compares the attention implementation that its config names, which
            passes of another thread switch.
        counts_hidden: Whether distances count tokens that the attention mask hides inside a prompt.
        adds_biases: Whether scores are biased by distance, as `Scoring.distances` says.
        most_tokens: By config, the longest row whose biases overrides compute as the code does, if there is one.
        widths: By config and the widths of a head's key and value, those that overrides store.
        repeats_heads: By config, whether it caches a KV head once for each of its query heads.
        image_mask: Where layers of its own attend to images, and hold their keys and values in their places of the
            cache, the argument that says which images a token sees.
        not_captured: Why its steps cannot be captured, if they cannot.
        states: Those that it keeps in a cache of its own class or in its modules, if it does.
    """

    overrides: Mapping[str, Mapping[str, Method]] = field(default_factory=dict)
    in_captures: Mapping[str, Mapping[str, Method]] = field(default_factory=dict)
    reads_masks: bool = False
    takes_no_positions: bool = False
    ignores_positions: Callable[[Any], bool] = lambda config: False
    counts_padding: bool = False
    places_tokens: bool = False
    hands_generate_on: Callable[[Mapping[str, Any]], bool] = lambda arguments: False
    scales_from: Callable[[Any], int | None] = lambda config: None
    compares_name: bool = False
    counts_hidden: bool = False
    adds_biases: bool = False
    most_tokens: Callable[[Any], int | None] = lambda config: None
    widths: Callable[[Any, int, int], tuple[int, int]] = lambda config, key, value: (key, value)
    repeats_heads: Callable[[Any], bool] = lambda config: False
    image_mask: str | None = None
    not_captured: str | None = None
    states: OwnStates | None = None

    @property
    def computes_layers(self) -> bool:
        """Whether attention, or states, run by code of this package."""
        return bool(self.overrides) or self.states is not None


_known: dict[str, OwnCode] = {}


def register(name: str, code: OwnCode) -> None:
    """Register a folder of ``transformers.models``; raises ValueError for a second entry of a name."""
    if name in _known:
        raise ValueError(f"{name} is registered already")
    _known[name] = code


def own_code_of(kind: type) -> OwnCode | None:
    """The entry of a class of models, modules or configs, or of a class that it derives from; None for most."""
    for base in kind.__mro__:
        if base.__module__.startswith(_HOME):
            name = base.__module__.removeprefix(_HOME).partition(".")[0]
            if (code := _known.get(name)) is not None:
                return code
    return None


def overrides_of(kind: type, *, in_captures: bool = False) -> Mapping[str, Method]:
    """Methods that stand in for those of a module's class; not for those of classes derived from it.

    Args:
        in_captures: Those of captured passes alone instead of those of all passes.
    """
    code = own_code_of(kind) if kind.__module__.startswith(_HOME) else None
    if code is None:
        return {}
    return (code.in_captures if in_captures else code.overrides).get(kind.__name__, {})


ATTENTION_NAME = "hf_fastdecode"
"""Name of the two functions in transformers' registries."""


@dataclass
class RowLengths:
    """Length of the longest row in the forward passes inside `active`, which decides whether windows hide tokens.

    Attributes:
        longest: Tokens of the longest row at the end of the pass. Windows of at least this size hide nothing and are
            dropped: layers then attend without a window.
        same_up_to: The smallest window that was dropped; None if none was. Rows of up to this length get the same
            computation, longer ones need the window (a captured step checks that).
        tables: Made by overrides for rows of that length, by their keys, see `interface.kept_for_capture`.
    """

    longest: int
    same_up_to: int | None = None
    tables: dict[Hashable, Tensor] = field(default_factory=dict)

    def serve(self, longest: int) -> bool:
        """Whether rows of up to this length get the same computation."""
        return self.same_up_to is None or longest <= self.same_up_to

    def keep_if_binding(self, window: int | None) -> int | None:
        """The window if it hides any token of the longest row; else None, with the window noted in `same_up_to`."""
        if window is None or self.longest > window:
            return window
        self.same_up_to = min(window, self.same_up_to or window)
        return None

    def attends_to(self, module: nn.Module, keys: Any, values: Any) -> SharedKV:
        """What a layer of the pass attends to that was given tensors, not what a cache stores.

        Raises:
            Unsupported: It must attend to what the cache stores.
        """
        raise Unsupported(f"{type(module).__name__} attends to keys that are not in the shared cache")


# Of the current forward pass; None outside `active`, hence in other threads.
_lengths: ContextVar[RowLengths | None] = ContextVar("hf_fastdecode_lengths", default=None)


lengths_of_pass = _lengths.get
"""Returns the lengths of this thread's forward pass; None outside `active`."""


class _NameOfPasses(str):
    """`ATTENTION_NAME`, which stock passes of other threads also find equal to what their config named before."""

    before: str | None

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (_lengths.get() is None and self.before == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


_configs = Switch(replaces=True)


def stock_attention(config: PreTrainedConfig) -> str:
    """The attention implementation that a config names when no pass has switched it, ``sdpa`` by default."""
    name: str | None = _configs.otherwise(config, ATTENTION_FIELD)
    return name if name and name != ATTENTION_NAME else "sdpa"


def _name_in(config: PreTrainedConfig) -> str:
    own = own_code_of(type(config))
    if own is None or not own.compares_name:
        return ATTENTION_NAME
    name = _NameOfPasses(ATTENTION_NAME)
    name.before = _configs.otherwise(config, ATTENTION_FIELD)
    return name


@contextmanager
def active(configs: Iterable[PreTrainedConfig], lengths: RowLengths) -> Iterator[None]:
    """Make these configs name our attention and mask function inside the context; restores them on exit.

    They are the distinct config objects that the model's attention layers and mask creation read.
    """
    changes = [Change(config, ATTENTION_FIELD, _name_in(config)) for config in configs]
    with setting(_lengths, lengths), _configs.on(changes):
        yield


def as_stock() -> AbstractContextManager[None]:
    """Context within `active` for modules that read no cache: their attention and masks are transformers' own."""
    return setting(_lengths, None)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on this device; None where it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def cast(tensor: Tensor) -> Tensor:
    """Cast queries, keys or values as autocast casts inputs of PyTorch's attention: all but float64."""
    dtype = autocast_dtype(tensor.device)
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off, so that operators compute in their inputs' dtype."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)
