"""What `enable` puts on a model instance, and takes off again.

Methods of the instance are wrapped (`methods`); the class, the modules and transformers stay as they are.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from .capture import Captures
from .eligibility import model_reason
from .methods import METHODS
from .options import Options
from .report import CallReport, Report
from .reuse import ReusedPrefixes
from .wrapping import STATE_ATTRIBUTE, WrappedMethods

logger = logging.getLogger("hf_fastdecode")


class Seams:
    """The state behind one enabled model; it stands in the model's ``__dict__`` and is gone after `uninstall`.

    Raises:
        TypeError: The model is not one that transformers can generate with.
    """

    def __init__(self, model: PreTrainedModel, options: Options):
        missing = [name for name in METHODS if not hasattr(model, name)]
        if missing:
            raise TypeError(
                f"{type(model).__name__} has no method {missing[0]!r}; enable takes a model that generates, from "
                "transformers >= 5.17, < 6"
            )
        self.options = options
        self.last_call: CallReport | None = None
        self.leaving = False  # disabled, and a call is still under way
        self.methods = WrappedMethods(model, METHODS)
        self.captures = Captures()
        self.reused = ReusedPrefixes()
        self._told: set[str] = set()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # methods of an instance are not pickled: the model is loaded as it was before `enable`

    def __deepcopy__(self, memo: dict[int, Any]) -> Seams:
        twin = memo[id(self)] = object.__new__(Seams)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    @contextmanager
    def call(self, model: PreTrainedModel) -> Iterator[bool]:
        """A `generate` call: what is undone within is undone at its end. Gives whether the call may share context."""
        with _switching:
            _calls[self] = _calls.get(self, 0) + 1
            may_share = seams_of(model) is self
        try:
            yield may_share
        finally:
            with _switching:
                _calls[self] -= 1
                if self.leaving and not _calls[self]:
                    self.take_off(model)

    def take_off(self, model: PreTrainedModel) -> None:
        """Put the model's methods back, and free what calls have left on its devices."""
        self.methods.take_off(model)
        self.reused.clear()
        self.captures.release()

    def tell(self, call: CallReport, reason: str, level: int = logging.WARNING) -> None:
        """Note that a call runs stock; log it the first time for each reason."""
        # transformers' own loop, draws and attention are what these ask for at most.
        of_stock = ("mode='eager'", "sampler='hf'", "fuse_projections=False")
        if unused := [option for option in self.options.forced if option not in of_stock]:
            reason, level = f"{reason}; {', '.join(unused)} not used", logging.WARNING
        call.path, call.reason = "stock", reason
        self.tell_once(f"this generate call runs stock transformers: {reason}", level)

    def tell_once(self, message: str, level: int = logging.WARNING) -> None:
        """Log a message the first time; messages that differ in numbers only are one."""
        kind = re.sub(r"\d+", "#", message)
        if kind not in self._told:
            self._told.add(kind)
            logger.log(level, message)


def _nothing() -> None:
    """What an enabled model's state is loaded as."""


# Guards the beginning and the end of calls against `install` and `uninstall`, in any thread.
_switching = Lock()
# How many are under way; not in `Seams`, which a copy of the model copies.
_calls: WeakKeyDictionary[Seams, int] = WeakKeyDictionary()


def install(model: PreTrainedModel, options: Options) -> None:
    """Wrap the model's methods, or replace the options of a model whose methods are wrapped."""
    with _switching:
        seams: Seams | None = vars(model).get(STATE_ATTRIBUTE)
        if seams is None:
            seams = Seams(model, options)
            seams.methods.put_on(model, seams)
        else:
            seams.options, seams.leaving = options, False
            seams.captures.retry()
            if not options.reuse_prefix:
                seams.reused.clear()


def uninstall(model: PreTrainedModel) -> None:
    """Undo `install`: now, or where `generate` calls are under way, when the last of them ends."""
    with _switching:
        if (seams := seams_of(model)) is None:
            return
        if _calls.get(seams):
            seams.leaving = True
        else:
            seams.take_off(model)


def seams_of(model: PreTrainedModel) -> Seams | None:
    """The state of an enabled model, or None."""
    seams: Seams | None = vars(model).get(STATE_ATTRIBUTE)
    return None if seams is None or seams.leaving else seams


def report_on(model: PreTrainedModel) -> Report:
    """What `hf_fastdecode.explain` returns."""
    seams = seams_of(model)
    return Report(
        model=type(model).__name__,
        enabled=seams is not None,
        layer_count=getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None),
        model_reason=model_reason(model),
        last_call=seams.last_call if seams else None,
    )
