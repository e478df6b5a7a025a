"""`replay_routing`: lets later passes of a model choose the experts that rows have chosen."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn

from ..foreign_code import held_model
from ..model_state import ModelState, generates, owned_by, state_of
from .choices import RouterChoices, model_type_of
from .routers import routers_of

_Replayed: TypeAlias = list[tuple[ModelState, RouterChoices | None]]


class replay_routing:  # noqa: N801 - used like `torch.set_grad_enabled`
    """Let routers choose the given experts in forward passes without a cache, as in scoring and training.

    Their weights, such as a softmax over the scores of the chosen ones, are computed from the current logits, to which
    gradients flow (rollout routing replay, R3, arXiv 2510.11370). It lasts until the end of a ``with`` block, within
    which backward passes need not be, or, called alone, until the next call; ``replay_routing(model, None)`` ends it.
    Its blocks may be entered again, and nested.

    A row of a pass gets the choices of the recorded row that has its tokens, or begins with them: rows may be
    shuffled, cut and padded. Of several such rows that at its own place counts, or else the shortest. A recorded row's
    last token, which `generate` gave to no layer, and padding are routed as usual, and so are passes with a cache and
    those of other calls of `generate`.

    Args:
        model: An enabled model with experts, or what wraps one, see `enable`.
        choices: ``router_choices`` of an output of `generate`, or some rows of it, ``choices[rows]``; None for none.

    Raises:
        ValueError: The model is not enabled, is of another type than that of the choices, or has other layers of
            experts or no decoder of text; or `stored` is none that `generate` returned. Later, passes raise it whose
            rows are not among the recorded ones, or whose routers cannot be told what to choose.
        TypeError: `model` neither is nor wraps a transformers model, or `choices` are none.
    """

    def __init__(self, model: nn.Module, choices: RouterChoices | None):
        self._model, self._choices = held_model(model), choices
        if choices is not None:
            self._check(choices)
        self._made: _Replayed | None = self._install()  # by this call, which a block may continue
        self._blocks: list[_Replayed] = []  # what was replayed before each that lasts, which may be nested

    def __enter__(self) -> None:
        before = self._install()
        if self._made is not None and all(one is self._choices for _, one in before):
            before = self._made
        self._made = None
        self._blocks.append(before)

    def __exit__(self, *error: object) -> None:
        for one, before in self._blocks.pop():
            one.replayed = before

    def _enabled(self) -> list[ModelState]:
        """The states of the model and of its decoder."""
        if (state := state_of(self._model)) is None:
            name = type(self._model).__name__
            raise ValueError(f"replay_routing needs an enabled {name}; call hf_fastdecode.enable(model) first")
        return [state, *(of_part for _, of_part in owned_by(state, self._model))]

    def _install(self) -> _Replayed:
        """Have the choices replayed, and return what was before."""
        before = [(one, one.replayed) for one in self._enabled()]
        for one, _ in before:
            one.replayed = self._choices
        return before

    def _check(self, choices: RouterChoices) -> None:
        name, enabled = type(self._model).__name__, self._enabled()
        if not isinstance(choices, RouterChoices):
            raise TypeError(
                f"choices must be RouterChoices or None, got {type(choices).__name__}; give router_choices of "
                "generate(..., return_dict_in_generate=True, output_router_choices=True)"
            )
        if generates(self._model) and len(enabled) == 1:
            raise ValueError(
                f"{name} has no decoder of text that was enabled with it, to replay choices; if its decoder was "
                "enabled by itself, disable that and enable the whole model, else use another model"
            )
        if (layers := len(routers_of(self._model))) != (given := len(choices.experts)):
            raise ValueError(f"{name} has {layers} layers of experts, and the choices are of {given}; use its own")
        if choices.model_type not in ("", kind := model_type_of(self._model)):
            raise ValueError(
                f"{name} is a {kind} model, and the choices are of a {choices.model_type} model; use its own"
            )
        stored, most = choices.stored, max(choices.experts) - 1
        whole = stored.dtype in (torch.uint8, torch.int16)
        if fits := stored.dim() == 3 and stored.shape[1] == layers and whole and stored.numel() > 0:
            pairs = zip(stored.amax((0, 2)).tolist(), choices.experts, strict=True)
            fits = bool(stored.amin() >= 0) and all(largest < experts for largest, experts in pairs)
        if not fits:
            numbers = f" from {stored.min()} to {stored.max()}" if stored.numel() else ""
            raise ValueError(
                f"stored must be experts [stored, {layers}, experts_per_token] from 0 to {most} in whole numbers, got "
                f"{stored.dtype} {list(stored.shape)}{numbers}; leave it as generate returned it"
            )
