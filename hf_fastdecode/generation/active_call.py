"""What is known of a `generate` call in progress, from its start on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerationMode

from .._compat import setting
from .call_context import CallContext, CallScope
from .forward_pass import left_out
from .inputs.given import GivenInputs
from .model_state import ModelState
from .report import CallReport
from .structure import Structure

_of_prefill: ContextVar[bool] = ContextVar("hf_fastdecode_of_prefill", default=False)


def calls_of_prefill() -> AbstractContextManager[None]:
    """Context in which this thread's calls of `generate` are those of `prefill`, see `ActiveCall.of_prefill`."""
    return setting(_of_prefill, True)


@dataclass
class ActiveCall:
    """A `generate` call in progress.

    Attributes:
        loop_is_ours: Whether this package's decoding loop was passed.
        may_hold: Whether `generate` has got it, so that what was held back comes to it.
        loop: The user's ``custom_generate``, if any.
        reports: One for each call of transformers' `generate`, of which a class's own `generate` may make several.
        mode: The mode that `generate` chose; None before that.
        synced_gpus: Whether all processes must run as many passes.
        given: Tensors that `generate` was given, by name.
        inputs: Images, videos or audio that are held back.
        context: What our loop decodes; None for a call that it hands over to transformers' loops.
        scope: Ends with the call.
        of_prefill: Whether `prefill` makes it: it is not reported, and `max_rows` does not bound its rows, since they
            do not decode.
    """

    model: PreTrainedModel
    loop_is_ours: bool
    may_hold: bool = field(default=False, init=False)
    loop: Callable[..., Any] | None = None
    mode: GenerationMode | None = field(default=None, init=False)
    synced_gpus: bool = field(default=False, init=False)
    given: dict[str, Tensor] = field(default_factory=dict)
    reports: list[CallReport] = field(default_factory=list, init=False)
    structure: Structure | None = None
    inputs: GivenInputs | None = None
    context: CallContext | None = None
    scope: CallScope = field(default_factory=CallScope)
    of_prefill: bool = field(default_factory=_of_prefill.get, init=False)

    @property
    def report(self) -> CallReport | None:
        """The report of the last of its calls of transformers' `generate`; None before the path of the first."""
        return self.reports[-1] if self.reports else None

    def begin(self, *, may_hold: bool) -> None:
        """Begin one call of transformers' `generate`, which a user's or a class's own may make several times.

        Captures that the one before held are free again: Whisper's own makes one for each segment and temperature.
        """
        if self.reports:
            self.scope.let_go()
        self.may_hold, self.inputs, self.mode = may_hold, None, None

    def hold(self, arguments: dict[str, Any], encode: Callable[[], dict[str, Any]] | None = None) -> None:
        """Take images, videos or audio out of these model arguments, until `give_back`.

        What a method of the instance prepares is none of them, such as the tasks of PEFT's prompt tuning.
        """
        prepare = vars(self.model).get("prepare_inputs_for_generation")
        taken = left_out(self.model, arguments) | (set() if prepare is None else signature(prepare).parameters.keys())
        others = {name: value for name, value in arguments.items() if name not in taken}
        if self.inputs is None and (inputs := GivenInputs.among(others, encode)) is not None:
            self.inputs = inputs
            for name in inputs.arguments:
                del arguments[name]

    def give_back(self, arguments: dict[str, Any]) -> None:
        """Add what was held back to these model arguments, as stock passes it on."""
        if self.inputs is not None:
            arguments.update(self.inputs.expanded())
            self.inputs = None


# The innermost active call of this thread.
active_call_of_thread: ContextVar[ActiveCall | None] = ContextVar("hf_fastdecode_active_call", default=None)


def active_call_of(model: PreTrainedModel) -> ActiveCall | None:
    """The innermost active call of this thread, if it is this model's."""
    call = active_call_of_thread.get()
    return call if call is not None and call.model is model else None


def structure_of_call(model_state: ModelState, model: PreTrainedModel) -> Structure:
    """The model's structure, read once per call."""
    if (call := active_call_of(model)) is None:
        return model_state.structure_of(model)
    if call.structure is None:
        call.structure = model_state.structure_of(model)
    return call.structure
