"""Configs, layers and modules of a model as passes over a cache need them, kept while the model is untouched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

from transformers import PreTrainedConfig, PreTrainedModel

from .._compat import COMPILED_CALL, uncompiled_call
from ..attention.overrides import RowLengths, active
from ..cache.layout import ModelLayout, keeps_state
from ..errors import Unsupported
from ..instance_methods import Change
from ..parallel.gathering.call import KeptGathering
from ..parallel.gathering.parameters import Gathering
from ..parallel.ranks import (
    ALONE,
    Ranks,
    Together,
    common_group,
    in_several_processes,
    sequence_group,
    splitting_groups,
)
from ..parallel.sequence import SequenceParallel
from ..parallel.shards import UNDIVIDED, Undivided
from ..parallel.watchdog import watchdog_of
from .forward_pass import input_device
from .fused.modules import FusedModules, runs_kernels
from .interception.segments import by_segments
from .interception.switches import Overrides, find_overrides, linear_of_torch, replaced_calls
from .options import Options
from .snapshot import ModelWalk, ModelWatch, modules_of

Answer = TypeVar("Answer")


class Structure:
    """A model's configs, layers and modules, for one call.

    Attributes:
        configs: The distinct config objects of the model and its modules, see `attention.overrides.active`.
        known: What holds while the model is untouched; None where nothing tells whether it is.
        division: How processes divide the call's contexts, if they do.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        known: Known | None = None,
        division: Undivided = UNDIVIDED,
        peer_timeout: float = float("inf"),
        kept_gathering: KeptGathering | None = None,
    ):
        self._model, self.known, self.division, self._peer_timeout = model, known, division, peer_timeout
        self._kept_gathering = kept_gathering or KeptGathering()
        self.configs: list[PreTrainedConfig] = self._configs() if known is None else known.configs

    def _configs(self) -> list[PreTrainedConfig]:
        found = {id(config): config for config in self.walk.attributes("config")}
        return [config for config in found.values() if isinstance(config, PreTrainedConfig)]

    @cached_property
    def walk(self) -> ModelWalk:
        return ModelWalk(self._model, None if self.known is None else self.known.watch.modules)

    @cached_property
    def layout(self) -> ModelLayout:
        """The stores of each layer; passes over a cache whose layout is checked do not need it."""
        if self.known is not None and self.known.layout is not None:
            return self.known.layout
        layout = ModelLayout.of(self._model, self.walk.modules)
        if self.known is not None and not layout.own:  # which are modules
            self.known.layout = layout
        return layout

    @cached_property
    def ranks(self) -> Ranks:
        """The processes that compute the model together, each with the same calls."""
        dividing = self.division.group
        if dividing is None and not in_several_processes():
            return ALONE
        try:
            groups = splitting_groups(self.walk.parameters)
            if dividing is not None:
                whole = common_group(groups[0] if groups else None, dividing)
                groups = [whole, *(group for group in (dividing, *groups) if group is not whole)]
        except Unsupported:  # for which `check_state` or `check_sequence_parallel` refuses the model
            groups = [] if dividing is None else [dividing]
        if not groups or (dividing is None and self.gathering is not None):
            return ALONE
        return Together(groups[0], input_device(self._model), watchdog_of(groups), type(self._model).__name__)

    @cached_property
    def running_pass(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes the context of a forward pass, in which processes of the model communicate, see `Watchdog`."""
        return partial(self.ranks.watchdog.running_pass, self._peer_timeout)

    def require_same_pass(self, input_ids: object, queries: int) -> None:
        """Raise ValueError on all processes if a pass that the user's code runs has other tokens on some of them.

        They may have been drawn by a generator that nobody compared. Embeddings are compared by their number alone.
        """
        fields = {"input_ids": input_ids, "number of tokens of a row": queries}
        with self.ranks.together() as offer:
            offer.compare(lambda: fields, "a forward pass was called differently")

    @property
    def alone(self) -> bool:
        """Whether no other process computes the model, or its contexts, with this one: nothing need be agreed on."""
        return self.ranks.alone

    @property
    def gathering(self) -> Gathering | None:
        """The library that gathers parameters in each pass; None without one, or where a call has gathered all."""
        return self._kept_gathering.of(self.walk.modules)

    @cached_property
    def fused(self) -> FusedModules | None:
        """Modules that run as kernels.

        None where they would not run, and where passes gather parameters: only a module that is called has its own.
        """
        if self.gathering is not None or not runs_kernels(self._model):
            return None
        found = self.kept("fused", lambda: FusedModules(self._model, self.walk.modules).found)
        return FusedModules(self._model, self.walk.modules, found)

    @cached_property
    def overrides(self) -> Overrides:
        return Overrides(self.walk.modules, self.kept("overrides", lambda: find_overrides(self.walk.modules)))

    @cached_property
    def _segmented(self) -> list[Change]:
        """Calls of modules that read states, see `by_segments`; those of fused modules are among theirs."""
        modules = self.walk.modules

        def find() -> list[int]:
            kinds = {kind for kind in self.walk.classes if keeps_state(kind)}
            return [number for number, module in enumerate(modules) if type(module) in kinds] if kinds else []

        fused = set() if self.fused is None else {one.number for one in self.fused.found}
        numbers = self.kept("modules that read states", find)
        found = (modules[number] for number in numbers if number not in fused)
        return [Change(one, COMPILED_CALL, by_segments(one, partial(uncompiled_call, one))) for one in found]

    @cached_property
    def captured_overrides(self) -> Overrides:
        """Further methods that run in captured passes alone."""
        found = self.kept("captured overrides", lambda: find_overrides(self.walk.modules, in_captures=True))
        return Overrides(self.walk.modules, found)

    @property
    def text_config(self) -> PreTrainedConfig:
        """The config of the decoder; of a model with an encoder mostly a copy, which takes time to make."""
        return self.kept("text config", lambda: self._model.config.get_text_config(decoder=True))

    @property
    def fused_names(self) -> str:
        return self.kept("fused names", lambda: str(self.fused or ""))

    def kept(self, question: Hashable, answer: Callable[[], Answer]) -> Answer:
        """The result of `answer`, asked once while the model is untouched; it must not refer to modules or tensors."""
        if self.known is None:
            return answer()
        if question not in self.known.answers:
            self.known.answers[question] = answer()
        found: Answer = self.known.answers[question]
        return found

    def keep(self, question: Hashable, answer: object) -> None:
        """Let `kept` return this from now on, while the model is untouched."""
        if self.known is not None:
            self.known.answers[question] = answer

    def forget(self) -> None:
        """Find modules anew from now on: the model may have changed within the call."""
        self.known = None
        self.release()

    def release(self) -> None:
        """Let go of the modules at the end of the call, so that those replaced after it are freed at once."""
        # Made again for passes after the call.
        for name in ("walk", "fused", "overrides", "captured_overrides", "_segmented"):
            vars(self).pop(name, None)

    @contextmanager
    def passing(self, lengths: RowLengths) -> Iterator[None]:
        """Context of a forward pass over a shared-context cache, see `attention.overrides.active`.

        Overrides of the architecture's attention code and fused modules run in it.
        """
        with ExitStack() as stack:
            stack.enter_context(active(self.configs, lengths))
            stack.enter_context(linear_of_torch())
            if self.overrides.found:
                stack.enter_context(self.overrides.installed())
            if self.fused is not None:
                stack.enter_context(self.fused.installed())
            if self._segmented:
                stack.enter_context(replaced_calls.on(self._segmented))
            yield


class Known:
    """Facts about a model that hold while its watch is untouched; neither modules nor tensors."""

    def __init__(self, structure: Structure):
        self.configs = structure.configs
        self.watch = ModelWatch(structure.walk, structure.configs)
        self.layout: ModelLayout | None = None  # until it is asked for, and for models with layers of kind "own"
        self.answers: dict[Hashable, Any] = {}  # by question, see `Structure.kept`


class KeptStructure:
    """Makes the structure of one model for each call, from what the last call knew of it if it is untouched since.

    Attributes:
        gathering: What divides the model's parameters.
    """

    def __init__(self) -> None:
        self.gathering = KeptGathering()
        self._known: Known | None = None
        self._division: Undivided = UNDIVIDED

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptStructure:
        return KeptStructure()  # a copy of the model has other modules

    def gathered(self, model: PreTrainedModel, options: Options) -> AbstractContextManager[tuple[int, float] | None]:
        return self.gathering.call(model, partial(modules_of, model), options.peer_timeout)

    def of(self, model: PreTrainedModel, options: Options) -> Structure:
        """The structure of the model as it is now, for a call with these options."""
        group = sequence_group(options.sequence_parallel)
        if group is None:
            division = UNDIVIDED
        elif (division := self._division).group is not group:
            division = self._division = SequenceParallel(group)
        known, others = self._known, (division, options.peer_timeout, self.gathering)
        if known is not None and not known.watch.touched():
            return Structure(model, known, *others)
        structure = Structure(model, None, *others)
        structure.known = self._known = Known(structure)
        return structure
