"""Samples of many problems behind one few-shot prompt, shared at no, one or two levels (Hydragen, section 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_fastdecode.errors import InputError
from hf_fastdecode.model_names import max_positions

from .calls import Batch, Measured, Timing, dtype_of, greedy_tokens, guarded, measure_calls
from .cases import LEVELS, HierCase, Level, check_point

CHECKED_TOKENS: Final = 8


class HierBench:
    """Measures calls in which two levels may be shared.

    `prompts` are the tokens of each problem's prompt, neighbours of which begin alike; `name`, `task` and `shots` are
    columns; `mode` and `sampler` are options of `enable`. In float32, with `check`, a level is measured only if its
    greedy tokens are stock's. Raises InputError where a prompt leaves no room for the new tokens.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        *,
        name: str,
        task: str,
        shots: int,
        timing: Timing,
        mode: str = "auto",
        sampler: str = "auto",
        check: bool = True,
    ):
        self.model, self.prompts, self.timing = model, prompts, timing
        self._columns: dict[str, Any] = {"model": name, "dtype": dtype_of(model), "task": task, "shots": shots}
        self._options = {"mode": mode, "sampler": sampler}
        self._check = check and model.dtype == torch.float32
        self._stock: tuple[HierCase, Tensor] | None = None
        limit, longest = max_positions(model.config), max(map(len, prompts))
        if limit is not None and longest + timing.new_tokens > limit:
            raise InputError(
                f"a prompt of {longest} tokens with {timing.new_tokens} new ones is longer than the {limit} positions "
                "of this model; lower `shots` or `new_tokens`"
            )

    def case(self, problems: int, samples: int) -> HierCase:
        """A case of the first problems; InputError as of `check_point`."""
        check_point(problems, samples, len(self.prompts))
        own = self.prompts[:problems]
        return HierCase(
            **self._columns,
            problems=problems,
            samples=samples,
            shared_tokens=min(_common(left, right) for left, right in pairwise(own)),
            prompt_tokens=max(map(len, own)),
            new_tokens=self.timing.new_tokens,
        )

    def measure(self, case: HierCase, level_name: str) -> dict[str, Any]:
        """The measured columns of a level, see `Measured`."""
        return guarded(lambda: self._measured(case, LEVELS[level_name])).columns

    def _measured(self, case: HierCase, level: Level) -> Measured:
        if self._check and level.shared and not torch.equal(self._greedy(case, level), self._stock_tokens(case)):
            return Measured({"status": "wrong: other greedy tokens than stock"})
        return measure_calls(self.model, self._batch(case, level), self._enable(case, level), self.timing)

    def _enable(self, case: HierCase, level: Level) -> dict[str, Any] | None:
        """Options of `enable` under which exactly this level's runs are shared."""
        if not level.shared:
            return None
        if not level.problems_apart:
            return self._options
        # No run of more tokens than this is common to two problems; the rows of one are one node all the same.
        longest = max(_common(left, right) for left, right in pairwise(self.prompts[: case.problems]))
        return self._options | {"min_shared_tokens": longest + 1}

    def _batch(self, case: HierCase, level: Level) -> Batch:
        rows = [number // case.samples for number in range(case.problems * case.samples)]
        if level.rows_apart:
            rows = [number % case.problems for number in range(len(rows))]
        return Batch.of([self.prompts[row] for row in rows], self.model)

    def _greedy(self, case: HierCase, level: Level) -> Tensor:
        """``[problems, samples, tokens]``: the first tokens, whatever the order of the rows."""
        most = min(CHECKED_TOKENS, self.timing.new_tokens)
        found = greedy_tokens(self.model, self._batch(case, level), self._enable(case, level), most)
        if level.rows_apart:
            return found.view(case.samples, case.problems, -1).transpose(0, 1)
        return found.view(case.problems, case.samples, -1)

    def _stock_tokens(self, case: HierCase) -> Tensor:
        if self._stock is None or self._stock[0] != case:
            one = greedy_tokens(self.model, self._one_each(case), None, min(CHECKED_TOKENS, self.timing.new_tokens))
            self._stock = case, one[:, None].expand(-1, case.samples, -1)
        return self._stock[1]

    def _one_each(self, case: HierCase) -> Batch:
        return Batch.of(self.prompts[: case.problems], self.model)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens that two prompts begin with."""
    different = (place for place, (one, other) in enumerate(zip(left, right)) if one != other)
    return next(different, min(len(left), len(right)))
