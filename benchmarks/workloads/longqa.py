"""Many questions about one long text at once, with the text shared and without (Hydragen, section 4.3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.calls import continuation, end_tokens_of
from hf_fastdecode.model_names import max_positions

from .calls import Batch, Measured, Timing, dtype_of, guarded, measure_calls
from .cases import QuestionsCase
from .document import LongDocument, is_right


class QuestionsBench:
    """Measures calls that ask many questions about one text; answers are drawn greedily.

    `name` and `document_name` are columns; `mode` is an option of `enable`. Raises InputError where a prompt leaves no
    room for the answer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        document: LongDocument,
        *,
        name: str,
        document_name: str,
        timing: Timing,
        mode: str = "auto",
    ):
        self.model, self.tokenizer, self.document, self.timing = model, tokenizer, document, timing
        self._mode = mode
        self._prompts = [tokenizer(document.prompt(fact), verbose=False).input_ids for fact in document.facts]
        self._answers: tuple[QuestionsCase, Tensor] | None = None
        self._columns: dict[str, Any] = {
            "model": name,
            "dtype": dtype_of(model),
            "document": document_name,
            "facts": len(document.facts),
            "prefix_tokens": len(tokenizer(document.prefix, verbose=False).input_ids),
        }
        limit, longest = max_positions(model.config), max(map(len, self._prompts))
        if limit is not None and longest + timing.new_tokens > limit:
            raise InputError(
                f"text and question of {longest} tokens with {timing.new_tokens} new ones are longer than the {limit} "
                "positions of this model; lower `tokens` or `new_tokens`"
            )

    def case(self, questions: int) -> QuestionsCase:
        """A case of so many questions."""
        return QuestionsCase(**self._columns, questions=questions, new_tokens=self.timing.new_tokens)

    def measure(self, case: QuestionsCase, way: str) -> dict[str, Any]:
        """The measured columns of a way, see `Measured`; and ``correct``: answers that are right."""
        measured = guarded(lambda: self._measured(case, way))
        if measured.tokens is None:
            return measured.columns
        return measured.columns | {"correct": self._correct(measured.tokens)}

    def _measured(self, case: QuestionsCase, way: str) -> Measured:
        asked = [self._prompts[number % len(self._prompts)] for number in range(case.questions)]
        batch = Batch.of(asked, self.model)
        enable = {"mode": self._mode} if way == "shared" else None
        measured = measure_calls(self.model, batch, enable, self.timing, must_share=case.questions > 1)
        if measured.tokens is not None and self.model.dtype == torch.float32:
            if self._answers is None or self._answers[0] != case:
                self._answers = case, measured.tokens
            elif not torch.equal(measured.tokens, self._answers[1]):
                return Measured({"status": "wrong: shared and stock give other tokens"})
        return measured

    def _correct(self, tokens: Tensor) -> int:
        ends = set(end_tokens_of(self.model))
        right = 0
        for row, drawn in enumerate(tokens.tolist()):
            at = row % len(self._prompts)
            length = next((place for place, token in enumerate(drawn) if token in ends), len(drawn))
            text = continuation(self.tokenizer, self._prompts[at], drawn[:length])
            right += is_right(text, self.document.facts[at])
        return right
