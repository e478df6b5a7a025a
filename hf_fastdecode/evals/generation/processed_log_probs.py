"""Log-probabilities of drawn tokens under the distribution that they were drawn from."""

from __future__ import annotations

from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from hf_fastdecode.generation.decoding.token_log_probs import TokenLogProbs


class ProcessedLogProbs(TokenLogProbs):
    """Gathers the log-probability of every drawn token after temperature and nucleus: 0 at temperature 0, greedy."""

    def __init__(self, temperature: float, top_p: float):
        super().__init__()
        self._greedy = temperature == 0
        self._warpers = [] if self._greedy else [TemperatureLogitsWarper(temperature)]
        if not self._greedy and top_p < 1:
            self._warpers.append(TopPLogitsWarper(top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Note the processed logits and return the raw ones as they are: `generate` processes them by itself."""
        processed = scores.float()
        if self._greedy:
            processed = processed.masked_fill(processed < processed.amax(-1, keepdim=True), float("-inf"))
        for warper in self._warpers:
            processed = warper(input_ids, processed)
        super().__call__(input_ids, processed)
        return scores
