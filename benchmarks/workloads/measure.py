"""Workloads measured: one batch of rows through `generate` in each way, prefill apart from decode, and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_fastdecode._compat import CACHE
from hf_fastdecode.api import enabled, explain
from hf_fastdecode.cache.shared import cache_bytes
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement import calls
from hf_fastdecode.model_names import max_positions

from ..latest import Latest
from .cases import LEVELS, HierCase, Level, QuestionsCase, check_point
from .document import LongDocument, is_right

CHECKED_TOKENS: Final = 8


@dataclass(frozen=True)
class Timing:
    """Settings of timed calls: every row draws `new_tokens`, at least 2, as `sampling` says, and none ends before.

    A call is repeated `repeats` times at most, and not again after `budget_s` seconds.
    """

    new_tokens: int
    repeats: int
    budget_s: float
    sampling: dict[str, Any]


def batch_of(prompts: Sequence[Sequence[int]], model: PreTrainedModel) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` ``[rows, width]`` int64 on the model's device, padded on the left."""
    width, pad = max(map(len, prompts)), model.generation_config.pad_token_id or 0
    ids = [[pad] * (width - len(own)) + list(own) for own in prompts]
    mask = [[0] * (width - len(own)) + [1] * len(own) for own in prompts]
    both = {"input_ids": ids, "attention_mask": mask}
    return {name: torch.tensor(rows, device=model.device) for name, rows in both.items()}


def measure_calls(
    model: PreTrainedModel,
    batch: dict[str, Tensor],
    enable: dict[str, Any] | None,
    timing: Timing,
    *,
    must_share: bool = True,
) -> dict[str, Any]:
    """Time calls of the rows after a warm-up, prefill and decode separately; `enable` is None for stock transformers.

    Raises NotAvailableError where an enabled model's call ran stock though it `must_share`.

    Returns:
        ``prefill_s``: seconds to the first token of all rows; ``decode_s``: seconds for the others; ``total_s``: both;
        ``ms_per_step``: `decode_s` over the steps; ``tokens_per_s``: tokens drawn in `decode_s`, over it;
        ``prefilled_tokens``: with stock's padding; ``kv_bytes``: of keys and values at the end; ``peak_bytes``: most
        memory over what was held before, on CUDA. Times are medians. ``tokens``: those of the first call, ``[rows,
        new_tokens]`` int64 on the CPU.
    """
    with _without_ends(model), enabled(model, **enable) if enable is not None else nullcontext():
        found = _timed(model, batch, timing)
        if enable is not None:
            ran, call = calls.what_ran(model, must_share=must_share), explain(model).last_call
            if call is not None and call.path == "shared":
                found |= {
                    "prefilled_tokens": call.prefilled_tokens,
                    "kv_bytes": call.nbytes.stored,
                    "forest": call.forest,
                }
            found["ran"] = ran
    return found


def greedy_tokens(
    model: PreTrainedModel, batch: dict[str, Tensor], enable: dict[str, Any] | None, new_tokens: int
) -> Tensor:
    """``[rows, new_tokens]`` int64 on the CPU: the most likely tokens."""
    with _without_ends(model), enabled(model, **enable) if enable is not None else nullcontext():
        drawn: Tensor = model.generate(**batch, do_sample=False, max_new_tokens=new_tokens)
    return drawn[:, batch["input_ids"].shape[1] :].cpu()


def _timed(model: PreTrainedModel, batch: dict[str, Tensor], timing: Timing) -> dict[str, Any]:
    device, most, (rows, width) = model.device, timing.new_tokens, batch["input_ids"].shape

    def call(new_tokens: int, **arguments: Any) -> Any:
        return model.generate(**batch, max_new_tokens=new_tokens, **timing.sampling, **arguments)

    with calls.seeded(device):
        first = call(most, return_dict_in_generate=True)
        tokens, cache = first.sequences[:, width:].cpu(), first[CACHE]
        held = None if cache is None else cache_bytes(cache)  # rows that were cut into waves leave none
        del first, cache
        calls.collect()
        before = calls.begin_peak(device)
        call(1)  # captures what it needs by itself
        prefills, decodes, _ = calls.prefill_and_decode(
            model, call, most, repeats=timing.repeats, budget_s=timing.budget_s
        )
    prefill, decode = calls.percentiles(prefills).p50, calls.percentiles(decodes).p50
    return {
        "prefill_s": prefill,
        "decode_s": decode,
        "total_s": prefill + decode,
        **calls.step_columns(decodes, most - 1, rows * (most - 1)),
        "prefilled_tokens": rows * width,
        "kv_bytes": held,
        "peak_bytes": calls.peak_over(device, before),
        "tokens": tokens,
    }


@contextmanager
def _without_ends(model: PreTrainedModel) -> Iterator[None]:
    """Within, no token ends a row and nothing that comes with a checkpoint changes what is drawn."""
    given = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=given.pad_token_id or 0)
    try:
        yield
    finally:
        model.generation_config = given


class _Workload:
    """A model with the tokens of its prompts; raises InputError where a prompt leaves no room for the new tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        timing: Timing,
        lower: str,
        columns: dict[str, Any],
    ):
        self.model, self.device, self.prompts, self.timing = model, model.device, prompts, timing
        self._columns = {**columns, "dtype": str(model.dtype).removeprefix("torch.")}
        limit, longest = max_positions(model.config), max(map(len, prompts))
        if limit is not None and longest + timing.new_tokens > limit:
            raise InputError(
                f"a prompt of {longest} tokens with {timing.new_tokens} new ones is longer than the {limit} positions "
                f"of this model; lower `{lower}` or `new_tokens`"
            )


class HierBench(_Workload):
    """Measures calls in which two levels may be shared; with `check`, in float32, only levels with stock's tokens."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        *,
        name: str,
        task: str,
        shots: int,
        timing: Timing,
        check: bool = True,
    ):
        super().__init__(model, prompts, timing, "shots", {"model": name, "task": task, "shots": shots})
        self._check = check and model.dtype == torch.float32
        self._stock: Latest[Tensor] = Latest()

    def case(self, problems: int, samples: int) -> HierCase:
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
        """The columns of a level, see `measure_calls`."""
        found = calls.guarded((), lambda: self._measured(case, LEVELS[level_name]))
        found.pop("tokens", None)
        return found

    def _measured(self, case: HierCase, level: Level) -> dict[str, Any]:
        if self._check and level.shared and not torch.equal(self._greedy(case, level), self._stock_tokens(case)):
            return {"status": "wrong: other greedy tokens than stock"}
        return measure_calls(self.model, self._batch(case, level), self._enable(case, level), self.timing)

    def _enable(self, case: HierCase, level: Level) -> dict[str, Any] | None:
        """Options of `enable` under which exactly this level's runs are shared."""
        if not level.shared:
            return None
        if not level.problems_apart:
            return {}
        # No run of more tokens than this is common to two problems; the rows of one are one node all the same.
        longest = max(_common(left, right) for left, right in pairwise(self.prompts[: case.problems]))
        return {"min_shared_tokens": longest + 1}

    def _batch(self, case: HierCase, level: Level) -> dict[str, Tensor]:
        rows = range(case.problems * case.samples)
        order = [row % case.problems if level.rows_apart else row // case.samples for row in rows]
        return batch_of([self.prompts[row] for row in order], self.model)

    def _greedy(self, case: HierCase, level: Level) -> Tensor:
        """``[problems, samples, tokens]``: the first tokens, whatever the order of the rows."""
        most = min(CHECKED_TOKENS, self.timing.new_tokens)
        found = greedy_tokens(self.model, self._batch(case, level), self._enable(case, level), most)
        if level.rows_apart:
            return found.view(case.samples, case.problems, -1).transpose(0, 1)
        return found.view(case.problems, case.samples, -1)

    def _stock_tokens(self, case: HierCase) -> Tensor:
        def make() -> Tensor:
            one_each = batch_of(self.prompts[: case.problems], self.model)
            one = greedy_tokens(self.model, one_each, None, min(CHECKED_TOKENS, self.timing.new_tokens))
            return one[:, None].expand(-1, case.samples, -1)

        return self._stock.of(case, make)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    different = (place for place, (one, other) in enumerate(zip(left, right)) if one != other)
    return next(different, min(len(left), len(right)))


class QuestionsBench(_Workload):
    """Measures calls that ask many questions about one text; answers are drawn greedily."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        document: LongDocument,
        *,
        name: str,
        document_name: str,
        timing: Timing,
    ):
        def ids_of(text: str) -> list[int]:
            ids: list[int] = tokenizer(text, verbose=False).input_ids
            return ids

        columns = {"model": name, "document": document_name, "facts": len(document.facts)}
        columns["prefix_tokens"] = len(ids_of(document.prefix))
        prompts = [ids_of(document.prompt(fact)) for fact in document.facts]
        super().__init__(model, prompts, timing, "tokens", columns)
        self.tokenizer, self.document = tokenizer, document
        self._answers: Latest[Tensor] = Latest()

    def case(self, questions: int) -> QuestionsCase:
        return QuestionsCase(**self._columns, questions=questions, new_tokens=self.timing.new_tokens)

    def measure(self, case: QuestionsCase, way: str) -> dict[str, Any]:
        """The columns of a way, see `measure_calls`; and ``correct``: answers that are right."""
        found = calls.guarded((), lambda: self._measured(case, way))
        tokens: Tensor | None = found.pop("tokens", None)
        return found if tokens is None else found | {"correct": self._correct(tokens)}

    def _measured(self, case: QuestionsCase, way: str) -> dict[str, Any]:
        batch = batch_of([self.prompts[number % len(self.prompts)] for number in range(case.questions)], self.model)
        enable: dict[str, Any] | None = {} if way == "shared" else None
        found = measure_calls(self.model, batch, enable, self.timing, must_share=case.questions > 1)
        if "tokens" not in found or self.model.dtype != torch.float32:
            return found
        right = torch.equal(found["tokens"], self._answers.of(case, lambda: found["tokens"]))
        return found if right else {"status": "wrong: shared and stock give other tokens"}

    def _correct(self, tokens: Tensor) -> int:
        ends, right = calls.end_tokens_of(self.model), 0
        for row, drawn in enumerate(tokens.tolist()):
            at = row % len(self.prompts)
            answer = drawn[: calls.count_before_end(drawn, ends)]
            text = calls.continuation(self.tokenizer, list(self.prompts[at]), answer)
            right += is_right(text, self.document.facts[at])
        return right
