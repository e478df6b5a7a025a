"""What passes with shared context need to know of a model, kept from call to call while the model is untouched."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .._compat import COMPILED_CALL, uncompiled_call
from ..attention.active_passes import RowLengths, active, lengths_of_pass
from ..attention.own_code import Method, stand_ins_of
from ..cache.layout import ModelLayout
from ..errors import Unsupported
from ..parallel.agreement import ALONE, Ranks, Together
from ..parallel.groups import common_group, in_several_processes, splitting_groups
from ..parallel.sequence import SequenceParallel
from ..parallel.watchdog import watchdog_of
from .foreign_code import Gathering, find_gathering, is_capturable, is_of_transformers
from .forward_pass import input_device
from .fused.modules import FusedModules
from .interception.switches import ReplacedCall, replaced_calls
from .model_watch import ModelWatch
from .snapshot import ModelWalk

Answer = TypeVar("Answer")


class Structure:
    """A model's configs, layers and modules, for one call.

    Attributes:
        configs: The distinct config objects of the model and its modules, see `attention.active_passes.active`.
        known: What holds while the model is untouched; None where nothing tells whether it is.
        parallel: The processes between which the call's context is divided, if it is.
    """

    def __init__(self, model: PreTrainedModel, known: Known | None = None, parallel: SequenceParallel | None = None):
        self._model, self.known, self.parallel = model, known, parallel
        self.configs: list[PreTrainedConfig] = self._configs() if known is None else known.configs

    def _configs(self) -> list[PreTrainedConfig]:
        found = {id(config): config for config in self.walk.attributes("config")}
        return [config for config in found.values() if isinstance(config, PreTrainedConfig)]

    @cached_property
    def walk(self) -> ModelWalk:
        return ModelWalk(self._model, None if self.known is None else self.known.watch.modules)

    @cached_property
    def layout(self) -> ModelLayout:
        """What each layer stores; passes over a cache that has met the model do not need it."""
        if self.known is not None and self.known.layout is not None:
            return self.known.layout
        layout = ModelLayout.of(self._model, self.walk.modules)
        if self.known is not None and not layout.own:  # which are modules
            self.known.layout = layout
        return layout

    @cached_property
    def ranks(self) -> Ranks:
        """The processes that compute the model together, each with the same calls."""
        if self.parallel is None and not in_several_processes():
            return ALONE
        dividing = None if self.parallel is None else self.parallel.group
        try:
            groups = splitting_groups(self.walk.parameters)
            if dividing is not None:
                whole = common_group(groups[0] if groups else None, dividing)
                groups = [whole, *(group for group in (dividing, *groups) if group is not whole)]
        except Unsupported:  # for which `check_state` or `check_sequence_parallel` refuses the model
            groups = [] if dividing is None else [dividing]
        if not groups or (dividing is None and self.gathering is not None):
            return ALONE
        return Together(groups[0], input_device(self._model), watchdog_of(groups))

    @property
    def spans_processes(self) -> bool:
        """Whether several processes compute the model, or divide its contexts."""
        return self.parallel is not None or self.ranks.count > 1

    @property
    def gathering(self) -> Gathering | None:
        return find_gathering(self.walk)

    @cached_property
    def fused(self) -> FusedModules | None:
        """Modules that run as kernels; None where they would not run: on other devices, or in other dtypes."""
        half = self._model.dtype in (torch.float16, torch.bfloat16)
        if not half or self._model.device.type != "cuda":
            return None
        found = self.kept("fused", lambda: FusedModules(self._model, self.walk.modules).found)
        return FusedModules(self._model, self.walk.modules, found)

    @cached_property
    def stand_ins(self) -> Overrides:
        return Overrides(self.walk.modules, self.kept("stand-ins", lambda: find_overrides(self.walk.modules)))

    @cached_property
    def captured_stand_ins(self) -> Overrides:
        """Further methods that run in captured passes alone."""
        found = self.kept("captured stand-ins", lambda: find_overrides(self.walk.modules, in_captures=True))
        return Overrides(self.walk.modules, found)

    @property
    def text_config(self) -> PreTrainedConfig:
        """The config of the decoder; of a model with an encoder mostly a copy, which takes time to make."""
        return self.kept("text config", lambda: self._model.config.get_text_config(decoder=True))

    @property
    def fused_names(self) -> str:
        return self.kept("fused names", lambda: str(self.fused or ""))

    def kept(self, question: Hashable, answer: Callable[[], Answer]) -> Answer:
        """What `answer` returns, asked once while the model is untouched; it must not refer to modules or tensors."""
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
        for name in ("walk", "fused", "stand_ins", "captured_stand_ins"):  # made again for passes after the call
            vars(self).pop(name, None)

    def passing(self, lengths: RowLengths) -> AbstractContextManager[None]:
        """Context of a forward pass over a shared-context cache, see `attention.active_passes.active`.

        Overrides of the architecture's attention code and fused modules run in it.
        """
        contexts = [active(self.configs, lengths)]
        if self.stand_ins.found:
            contexts.append(self.stand_ins.installed())
        if self.fused is not None:
            contexts.append(self.fused.installed())
        return contexts[0] if len(contexts) == 1 else _all(contexts)


@contextmanager
def _all(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


class Known:
    """What was found about a model, which holds while its watch is untouched; neither modules nor tensors.

    Attributes:
        layout: None until it is asked for, and for models with layers of kind ``own``.
        answers: By question, see `Structure.kept`.
    """

    def __init__(self, structure: Structure):
        self.configs = structure.configs
        self.watch = ModelWatch(structure.walk, structure.configs)
        self.layout: ModelLayout | None = None
        self.answers: dict[Hashable, Any] = {}


class KeptStructure:
    """Makes the structure of one model for each call, from what the last call knew of it if it is untouched since."""

    def __init__(self) -> None:
        self._known: Known | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptStructure:
        return KeptStructure()  # a copy of the model has other modules

    def of(self, model: PreTrainedModel, parallel: SequenceParallel | None = None) -> Structure:
        """The structure of the model as it is now, for a call whose context is divided between these processes."""
        known = self._known
        if known is not None and not known.watch.touched():
            return Structure(model, known, parallel)
        structure = Structure(model, parallel=parallel)
        structure.known = self._known = Known(structure)
        return structure


_KNOWN = ("transformers.", "hf_fastdecode.")
"""Where classes are defined that change nothing of a base's attention, or attend to a shared-context cache."""


class Found(NamedTuple):
    """An overridden method: the number of its module among the model's, and its name."""

    number: int
    name: str
    method: Method


def find_overrides(modules: Sequence[nn.Module], *, in_captures: bool = False) -> list[Found]:
    """The methods of a model's modules that are overridden, in all passes or in captured ones alone.

    Raises Unsupported for a class derived from one with overrides: what it changes, they would leave out.
    """
    kinds = {kind: stand_ins_of(kind, in_captures=in_captures) for kind in set(map(type, modules))}
    for kind in kinds:
        base = next((base for base in kind.__mro__[1:] if stand_ins_of(base, in_captures=in_captures)), None)
        if base is not None and not kind.__module__.startswith(_KNOWN):
            raise Unsupported(
                f"{kind.__name__} derives from {base.__name__}, whose attention has code of its own here, which would "
                "leave out what it changes"
            )
    return [
        Found(number, name, method)
        for number, module in enumerate(modules)
        for name, method in kinds[type(module)].items()
    ]


class Overrides:
    """Overrides of the attention code of a model, and the context in which they run.

    Args:
        modules: The model's modules.
        found: Of these modules.
    """

    def __init__(self, modules: Sequence[nn.Module], found: Sequence[Found]):
        self._modules, self.found = modules, found

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Context in which passes over a shared-context cache, of this thread, run them.

        Raises:
            Unsupported: A module has a hook or a method of its own, or a compiled call, which would not run.
        """
        for one in self.found:
            _require_plain(self._modules[one.number], one.name)
        replaced_calls.enter(self._calls)
        try:
            yield
        finally:
            replaced_calls.leave(self._calls)

    @cached_property
    def _calls(self) -> list[ReplacedCall]:
        return [_replacement(self._modules[one.number], one.name, one.method) for one in self.found]


def _require_plain(module: nn.Module, name: str) -> None:
    """Check that nothing of the user's runs in the method's calls."""
    kind, own = type(module), vars(module)
    hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
    if {"_hf_hook", "_call_impl", "forward"} & own.keys() or not all(map(is_capturable, hooks)):
        raise Unsupported(f"{kind.__name__} has a hook or a forward of its own, which would not run")
    if replaced_calls.is_taken(module, _attribute(name)):
        what = "compiled call" if name == "forward" else f"{name} of its own"
        raise Unsupported(f"{kind.__name__} has a {what}, which would not run")
    if name != "forward" and not is_of_transformers(getattr(kind, name)):  # `check_code` has seen the classes' forward
        raise Unsupported(f"{kind.__name__}.{name} is not transformers' own, and would not run")


def _attribute(name: str) -> str:
    return COMPILED_CALL if name == "forward" else name


def _replacement(module: nn.Module, name: str, method: Method) -> ReplacedCall:
    """The call of an override; passes of other threads run the module's own method."""
    own: Callable[..., Any] = uncompiled_call if name == "forward" else getattr(type(module), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (own if lengths_of_pass() is None else method)(module, *args, **kwargs)

    return ReplacedCall(module, _attribute(name), call)
