"""What `generate` returns with ``return_dict_in_generate``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput


@dataclass
class FastDecodeOutput(GenerateDecoderOnlyOutput):
    """Output of `generate` with ``return_dict_in_generate``: transformers' fields plus `logprobs`.

    Attributes:
        logprobs: ``[rows, new_tokens]`` fp32: log-probability of each sampled token under the raw logits, natural log,
            0 after a row's end; None with transformers' own sampler.
    """

    logprobs: Tensor | None = None


@dataclass
class FastDecodeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """The same of a model with an encoder: transformers' fields plus `logprobs`, see `FastDecodeOutput`."""

    logprobs: Tensor | None = None
