"""Registry of architectures whose attention the interface alone does not reach, filled by ``patches``.

Most attention classes hand what ``update`` returned to an attention function (`attention.interface`). Some compute
with it themselves. Such an architecture registers methods that stand in for its own in passes over a shared-context
cache, and what else differs. A missing flag alone (``_supports_attention_backend``) is an entry without methods.
Likewise what keeps passes from being captured, or tokens from being packed, may have an override, and code that keeps
states elsewhere than in the cache (`OwnStates`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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
        beams: Whether transformers runs beam search with its own cache of them; where not, it raises.
    """

    count: int
    continues: bool = False
    beams: bool = True


@dataclass(frozen=True)
class OwnCode:
    """Overrides and properties that an architecture needs beyond the attention interface.

    Attributes:
        stand_ins: Class name -> method name -> method.
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

    stand_ins: Mapping[str, Mapping[str, Method]] = field(default_factory=dict)
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
        return bool(self.stand_ins) or self.states is not None


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


def stand_ins_of(kind: type, *, in_captures: bool = False) -> Mapping[str, Method]:
    """Methods that stand in for those of a module's class; not for those of classes derived from it.

    Args:
        in_captures: Those of captured passes alone instead of those of all passes.
    """
    code = own_code_of(kind) if kind.__module__.startswith(_HOME) else None
    if code is None:
        return {}
    return (code.in_captures if in_captures else code.stand_ins).get(kind.__name__, {})
