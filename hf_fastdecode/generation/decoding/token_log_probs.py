"""Log-probabilities of drawn tokens by the model's raw logits, gathered step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessor


class NotFiniteError(ArithmeticError):
    """Logits that hold NaN, from which no token can be drawn."""


class TokenLogProbs(LogitsProcessor):
    """Gathers the raw log-probability of every token that a `generate` call draws.

    The same numbers as from ``output_logits=True``, which keeps ``rows * vocabulary`` logits of every step; this keeps
    one number per row and step, and finished rows are still compacted away. Pass it to one call as
    ``logits_processor=[log_probs]``, then ask `of`:

        log_probs = hf_fastdecode.TokenLogProbs()
        sequences = model.generate(**inputs, logits_processor=[log_probs])
        log_probs.of(sequences[:, inputs["input_ids"].shape[1]:])

    In calls that run stock it works as an ordinary processor, and sees what the processors before it leave: those of
    `generate` for repetition, length and suppressed tokens stand before a caller's own, temperature, top-p and top-k
    behind.

    Args:
        on_step: Called at each step with the number of tokens drawn before it.
    """

    def __init__(self, on_step: Callable[[int], None] = lambda drawn: None):
        self.on_step = on_step
        self._drawn: list[Tensor] = []  # [rows, 1] or [rows, steps] each
        self._latest: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the logits ``[rows, vocabulary]`` and return them as they are.

        Raises:
            NotFiniteError: One is NaN at the first step, since looking waits for the GPU; `of` looks at the others.
        """
        self._note(input_ids[:, -1:])
        self.before_draw(scores, len(self._drawn))
        self._latest = scores.float().log_softmax(-1)
        return scores

    def before_draw(self, logits: Tensor, drawn: int) -> None:
        """Report a step, and check the first logits.

        Args:
            logits: ``[rows, vocabulary]``.
            drawn: Tokens drawn for each row before.

        Raises:
            NotFiniteError: One is NaN at the first step.
        """
        if drawn == 0 and bool(logits.isnan().any()):
            raise NotFiniteError
        self.on_step(drawn)

    def take(self, log_probs: Tensor) -> None:
        """Take over ``[rows, steps]`` float32 log-probabilities that a decoding loop gathered itself."""
        self._drawn, self._latest = [log_probs], None

    def of(self, tokens: Tensor) -> Tensor:
        """Log-probabilities of the tokens that the call drew.

        Args:
            tokens: ``[rows, steps]`` int64: what `generate` returned, without the prompts.

        Returns:
            ``[rows, steps]`` float32, natural logarithm; behind a row's end token or stop it holds no meaning.

        Raises:
            NotFiniteError: One is NaN.
            ValueError: The call drew fewer tokens, or other rows.
        """
        if self._latest is not None and sum(part.shape[1] for part in self._drawn) < tokens.shape[1]:
            self._note(tokens[:, -1:])  # unless the GPU ran a step too many, which generate dropped
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
