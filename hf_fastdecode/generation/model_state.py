"""The state of one enabled model: its options, what was captured and kept for it, its calls under way."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from .instance_patch import STATE_ATTRIBUTE, WrappedMethods, Wrapper
from .options import Options
from .prompts.kept_prefixes import ReusedPrefixes
from .report import CallReport
from .steps.cuda_graph import Captures

logger = logging.getLogger("hf_fastdecode")


class ModelState:
    """The state behind one enabled model; it stands in the model's ``__dict__`` and is gone after `disable`.

    Args:
        model: The model.
        options: Of `enable`.
        hooks: Wrappers of the model's methods, by name.

    Raises:
        TypeError: The model is not one that transformers can generate with.
    """

    def __init__(self, model: PreTrainedModel, options: Options, hooks: Mapping[str, Wrapper]):
        missing = [name for name in hooks if not hasattr(model, name)]
        if missing:
            raise TypeError(
                f"{type(model).__name__} has no method {missing[0]!r}; enable takes a model that generates, from "
                "transformers >= 5.17, < 6"
            )
        self.options = options
        self.last_call: CallReport | None = None
        self.disable_pending = False  # disabled, and a call is still under way
        self.methods = WrappedMethods(model, hooks)
        self.captures = Captures()
        self.reused = ReusedPrefixes()
        self._logged: set[str] = set()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # methods of an instance are not pickled: the model is loaded as it was before `enable`

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelState:
        twin = memo[id(self)] = object.__new__(ModelState)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    @contextmanager
    def call(self, model: PreTrainedModel) -> Iterator[bool]:
        """A `generate` call: what is undone within is undone at its end. Gives whether the call may share context."""
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
        """Whether a call is under way; asked while `STATE_LOCK` is held."""
        return _calls.get(self, 0) > 0

    def uninstall(self, model: PreTrainedModel) -> None:
        """Put the model's methods back, and free what calls have left on its devices."""
        self.methods.uninstall(model)
        self.reused.clear()
        self.captures.release()

    def report_stock(self, call: CallReport, reason: str, level: int = logging.WARNING) -> None:
        """Note that a call runs stock; log it the first time for each reason."""
        # transformers' own loop, draws and attention are what these ask for at most.
        of_stock = ("mode='eager'", "sampler='hf'", "fuse_projections=False")
        if unused := [option for option in self.options.forced if option not in of_stock]:
            reason, level = f"{reason}; {', '.join(unused)} not used", logging.WARNING
        call.path, call.reason = "stock", reason
        self.log_once(f"this generate call runs stock transformers: {reason}", level)

    def log_once(self, message: str, level: int = logging.WARNING) -> None:
        """Log a message the first time; messages that differ in numbers only are one."""
        kind = re.sub(r"\d+", "#", message)
        if kind not in self._logged:
            self._logged.add(kind)
            logger.log(level, message)


def _nothing() -> None:
    """What an enabled model's state is loaded as."""


STATE_LOCK = Lock()
"""Guards the beginning and the end of calls against `enable` and `disable`, in any thread."""

# How many are under way; not in `ModelState`, which a copy of the model copies.
_calls: WeakKeyDictionary[ModelState, int] = WeakKeyDictionary()


def state_of(model: PreTrainedModel) -> ModelState | None:
    """The state of an enabled model, or None."""
    model_state: ModelState | None = vars(model).get(STATE_ATTRIBUTE)
    return None if model_state is None or model_state.disable_pending else model_state
