"""Per-model state of `enable`: options, captured steps, prefix store, and the last call's report."""

from __future__ import annotations

import copy
import logging
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

from .._compat import local_part, tensor_version
from ..instance_methods import STATE_ATTRIBUTE
from ..log import logger
from .interception.switches import WrappedMethods, Wrapper
from .options import Options
from .prompts.prefix_store import PrefixStore
from .report import CallReport, ForwardReport
from .routing.choices import RouterChoices
from .snapshot import modules_of
from .steps.captures import Captures
from .structure import KeptStructure, Structure


class ModelState:
    """State of one enabled model, stored in the model's ``__dict__`` until `disable`.

    Args:
        hooks: Overrides of the model's methods.
        owner: The state of the model that this one is the decoder of, and was enabled with.

    Raises:
        TypeError: The model lacks a method, as in a transformers version that is not supported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        options: Options,
        hooks: Mapping[str, Wrapper],
        owner: ModelState | None = None,
    ):
        missing = [name for name in hooks if not hasattr(model, name)]
        if missing:
            raise TypeError(
                f"{type(model).__name__} has no method {missing[0]!r}, as models of transformers >= 5.17, < 6 that "
                "generate have"
            )
        self.options = options
        self.last_call: CallReport | None = None
        self.last_forward: ForwardReport | None = None
        self.kept_forward: object = None  # of `forward.reuse`, with `reuse_prefix`
        self.last_rows: object = None  # likewise, with log_probs="trainer"
        self.replayed: RouterChoices | None = None  # in passes without a cache, see `replay_routing`
        self.disable_pending = False  # `disable` was called during a generate call
        self.methods = WrappedMethods(model, hooks)
        self.owner = None if owner is None else owner.methods.key  # which copies of both share
        self.captures = Captures()
        self.structure = KeptStructure()
        self.prefix_store = PrefixStore()
        self.repeated = RepeatedPrompts()
        self.short_calls: object = None  # of `prompts.gain`, once a call has saved too little
        self._logged: set[str] = set()

    def structure_of(self, model: PreTrainedModel) -> Structure:
        return self.structure.of(model, self.options)

    def gathered(self, model: PreTrainedModel) -> AbstractContextManager[tuple[int, float] | None]:
        """Context of a call, for which parameters that processes divide are gathered; see `KeptGathering.call`."""
        return self.structure.gathered(model, self.options)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None: overrides are not pickled, so that the model loads as before `enable`, also without this package."""
        if self.owner is None:
            then = "call hf_fastdecode.enable(model) on what is loaded"
            self.log_once(f"if this pickled model is loaded, it is as before enable: {then}")
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        twin = memo[id(self)] = object.__new__(ModelState)
        vars(twin).update(copy.deepcopy(vars(self) | {"replayed": None}, memo))  # choices are of this model's passes
        return twin

    @contextmanager
    def call(self, model: PreTrainedModel) -> Iterator[bool]:
        """Scope of a `generate` call; yields whether it may share context. Defers a `disable` within to the end."""
        with STATE_LOCK:
            _calls[self] = _calls.get(self, 0) + 1
            may_share = state_of(model) is self
        try:
            yield may_share
        finally:
            with STATE_LOCK:
                _calls[self] -= 1
                if self.disable_pending and not _calls[self]:
                    self.uninstall(model)

    def is_generating(self) -> bool:
        """Whether a call is in progress; requires `STATE_LOCK`."""
        return _calls.get(self, 0) > 0

    def uninstall(self, model: PreTrainedModel) -> None:
        """Restore the model's methods and free captured steps and stored prefixes."""
        for part, state in owned_by(self, model):
            state.uninstall(part)
        self.methods.uninstall(model)
        self.kept_forward = self.last_rows = self.replayed = None
        self.prefix_store.clear()
        self.captures.release()

    def note_prompt(self, model: PreTrainedModel, tokens: Tensor) -> None:
        """Take note of a call's first prompt, and log what would help where prompts of several calls begin alike."""
        if (advice := self.repeated.advice(model, tokens, least=self.options.fewest_saved)) is not None:
            self.log_once(advice)

    def log_once(self, message: str, level: int = logging.WARNING) -> None:
        """Log a message once; messages that differ only in numbers, or in their being bounds, count as equal."""
        kind = re.sub(r"(at most )?\d+", "#", message)
        if kind not in self._logged:
            self._logged.add(kind)
            logger.log(level, message)


STATE_LOCK = Lock()
"""Serializes `enable`, `disable`, and the start and end of calls over threads."""

# Calls in progress; not in `ModelState`, which is copied with the model.
_calls: WeakKeyDictionary[ModelState, int] = WeakKeyDictionary()


def generates(model: PreTrainedModel) -> bool:
    """Whether the model has transformers' `generate`, unlike plain decoders, and models for rewards or classes."""
    return isinstance(model, GenerationMixin)


def state_of(model: PreTrainedModel) -> ModelState | None:
    model_state: ModelState | None = vars(model).get(STATE_ATTRIBUTE)
    return None if model_state is None or model_state.disable_pending else model_state


def owned_by(owner: ModelState, model: PreTrainedModel) -> list[tuple[PreTrainedModel, ModelState]]:
    """The modules within a model that were enabled with it, and the state of each."""
    return [(part, its_state) for part, its_state in _enabled_in(model) if its_state.owner == owner.methods.key]


def _enabled_in(model: PreTrainedModel) -> list[tuple[PreTrainedModel, ModelState]]:
    """The enabled modules within a model, and the state of each."""
    parts = [(module, vars(module).get(STATE_ATTRIBUTE)) for module in modules_of(model) if module is not model]
    return [(part, its_state) for part, its_state in parts if its_state is not None]


def last_forward_of(model: PreTrainedModel) -> ForwardReport | None:
    """The report of the last forward pass without a cache of an enabled model, or of its decoder."""
    if (model_state := state_of(model)) is None:
        return None
    reports = [its_state.last_forward for _, its_state in _enabled_in(model)]
    return next((report for report in reports if report is not None), model_state.last_forward)


_CALLS_TO_TELL = 3
_RECENT = 8  # prompts that a new one is compared with
_LONGEST = 1024  # tokens by which prompts are compared


class RepeatedPrompts:
    """Counts calls whose first prompt begins like one of the last few, for the same weights."""

    def __init__(self) -> None:
        self._recent: deque[list[int]] = deque(maxlen=_RECENT)
        self._weights: object = None
        self._repeated = 0
        self._lock = Lock()  # calls of several threads are counted together

    def __deepcopy__(self, memo: dict[int, Any]) -> RepeatedPrompts:
        return RepeatedPrompts()

    def advice(self, model: PreTrainedModel, prompt: Tensor, *, least: int) -> str | None:
        """Take note of a call's prompt, and say what would help once it is the third that begins like an earlier one.

        Prompts begin alike by their first `least` tokens. After a training step they must be computed again, so that
        counting begins anew.
        """
        if not len(prompt) >= least <= _LONGEST:
            return None
        weight = next(model.parameters())
        weights = (local_part(weight).data_ptr(), tensor_version(weight))
        beginning = prompt[:least].tolist()
        with self._lock:
            if weights != self._weights:
                self._weights, self._repeated = weights, 0
                self._recent.clear()
            self._repeated += beginning in self._recent
            self._recent.append(beginning)
            repeated = self._repeated
        if repeated != _CALLS_TO_TELL:
            return None
        return (
            f"{repeated} calls had a prompt that begins like an earlier call's; "
            "hf_fastdecode.enable with `reuse_prefix=True` keeps prompts, so that later calls prefill new tokens only"
        )
