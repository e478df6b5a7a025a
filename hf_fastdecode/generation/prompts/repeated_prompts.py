"""Notices calls whose prompt begins like that of an earlier call, which `reuse_prefix` would not prefill again."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..._compat import tensor_version
from .prompt_plan import PromptGroup

_CALLS_TO_TELL = 3
_RECENT = 8  # prompts that a new one is compared with
_LONGEST = 1024  # tokens of each that are kept


class RepeatedPrompts:
    """Counts calls whose first prompt begins like one of the last few, for the same weights."""

    def __init__(self) -> None:
        self._recent: deque[Tensor] = deque(maxlen=_RECENT)
        self._weights: object = None
        self._repeated = 0
        self._lock = Lock()  # calls of several threads are counted together

    def __deepcopy__(self, memo: dict[int, Any]) -> RepeatedPrompts:
        return RepeatedPrompts()

    def advice(self, model: PreTrainedModel, groups: list[PromptGroup], *, least: int) -> str | None:
        """Take note of a call, and say what would help once this is the third that begins like an earlier one.

        Args:
            model: The model; after training steps prompts must be computed again, so that it begins anew.
            groups: The call's prompts.
            least: Tokens that two prompts must have in common to begin alike.
        """
        weight = next(model.parameters())
        weights = (weight.data_ptr(), tensor_version(weight))
        tokens = groups[0].tokens[:_LONGEST].clone()
        with self._lock:
            if weights != self._weights:
                self._weights, self._repeated = weights, 0
                self._recent.clear()
            self._repeated += any(_begin_alike(tokens, other, least) for other in self._recent)
            self._recent.append(tokens)
            repeated = self._repeated
        if repeated != _CALLS_TO_TELL:
            return None
        return (
            f"{repeated} calls had a prompt that begins like an earlier call's; "
            "hf_fastdecode.enable(model, reuse_prefix=True) keeps prompts, so that later calls prefill new tokens only"
        )


def _begin_alike(one: Tensor, other: Tensor, least: int) -> bool:
    return min(len(one), len(other)) >= least and bool((one[:least] == other[:least]).all())
