"""Log-probabilities of sampled tokens under the model's raw logits, gathered step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessor


class NotFiniteError(ArithmeticError):
    """Raised for NaN logits, from which no token can be sampled."""


class TokenLogProbs(LogitsProcessor):
    """Records the raw log-probability of every token sampled by a `generate` call.

    Gives the same numbers as ``output_logits=True``, which keeps ``rows * vocabulary`` logits per step, but keeps one
    number per row and step and allows compaction of finished rows. Pass it to one call as
    ``logits_processor=[log_probs]``, then call `of`:

        log_probs = hf_fastdecode.TokenLogProbs()
        sequences = model.generate(**inputs, logits_processor=[log_probs])
        log_probs.of(sequences[:, inputs["input_ids"].shape[1]:])

    In stock calls it is an ordinary processor and sees the output of earlier ones: `generate` places its processors
    for repetition, length and suppressed tokens before a caller's own, and temperature, top-p and top-k after.

    Args:
        on_step: Called at each step with the number of tokens sampled before.
    """

    def __init__(self, on_step: Callable[[int], None] = lambda drawn: None):
        self.on_step = on_step
        self._drawn: list[Tensor] = []  # [rows, 1] or [rows, steps] each
        self._latest: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record the logits ``[rows, vocabulary]`` and return them unchanged.

        Raises:
            NotFiniteError: One is NaN at the first step; `of` checks later steps, since a check waits for the GPU.
        """
        self._note(input_ids[:, -1:])
        self.before_draw(scores, len(self._drawn))
        self._latest = scores.float().log_softmax(-1)
        return scores

    def before_draw(self, logits: Tensor, drawn: int) -> None:
        """Report a step, and check the first step's logits.

        Args:
            logits: ``[rows, vocabulary]``.
            drawn: Tokens sampled per row before.

        Raises:
            NotFiniteError: One is NaN at the first step.
        """
        if drawn == 0 and bool(logits.isnan().any()):
            raise NotFiniteError
        self.on_step(drawn)

    def take(self, log_probs: Tensor) -> None:
        """Set ``[rows, steps]`` float32 log-probabilities gathered by a decoding loop."""
        self._drawn, self._latest = [log_probs], None

    def of(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of the tokens that the call sampled.

        Args:
            tokens: ``[rows, steps]`` int64: the output of `generate` without the prompts.

        Returns:
            ``[rows, steps]`` float32, natural logarithm; undefined after a row's end token or stop.

        Raises:
            NotFiniteError: One is NaN.
            ValueError: The call sampled fewer tokens, or other rows.
        """
        if self._latest is not None and sum(part.shape[1] for part in self._drawn) < tokens.shape[1]:
            self._note(tokens[:, -1:])  # unless the GPU ran an extra step, which generate dropped
        found = torch.cat(self._drawn, dim=1) if self._drawn else tokens.new_empty(*tokens.shape[:1], 0).float()
        if len(found) != len(tokens) or found.shape[1] < tokens.shape[1]:
            raise ValueError(
                f"got tokens of shape {tuple(tokens.shape)}, and log-probabilities of shape {tuple(found.shape)} were "
                "gathered; pass what generate returned without the prompts, and a new TokenLogProbs to each call"
            )
        found = found[:, : tokens.shape[1]]
        if bool(found.isnan().any()):
            raise NotFiniteError
        return found

    def _note(self, tokens: Tensor) -> None:
        if self._latest is not None:
            self._drawn.append(self._latest.gather(1, tokens.to(self._latest.device)))
