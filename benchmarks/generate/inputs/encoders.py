"""The inputs of encoders: a text for models like T5, and a recording for Whisper, with what begins a transcript."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hf_fastdecode.errors import InputError

from ..cases import GenerateCase
from .given import FIRST_ID, followed, for_rows, of_length, refuse_trees

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_BEGIN = 4  # tokens of a transcript's beginning: start, language, task, no timestamps


class EncodedText:
    """Random token ids for the encoder, as many as the case's context; the decoder begins with one token."""

    returns_cache = True

    def check(self, case: GenerateCase) -> None:
        """Refuse trees."""
        refuse_trees(case)

    def prompt_length(self, case: GenerateCase) -> int:
        """The token that decoders begin with."""
        return 1

    def arguments(self, model: PreTrainedModel, case: GenerateCase) -> dict[str, Any]:
        """Ids of the encoder's input, ``[1, context]``, and a mask of ones."""
        import torch

        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(FIRST_ID, model.config.vocab_size, (1, case.context), generator=generator)
        ids = ids.to(model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def drawing(self, arguments: dict[str, Any], new_tokens: int) -> dict[str, Any]:
        """As they are, with the number of new tokens."""
        return of_length(arguments, new_tokens)

    def logits(self, model: PreTrainedModel, case: GenerateCase, drawn: Tensor) -> Tensor:
        """As `Given.logits`."""
        encoded, begin = for_rows(self.arguments(model, case), len(drawn)), drawn.new_zeros(1, 1)
        begin += model.generation_config.decoder_start_token_id
        found: Tensor = model(**encoded, decoder_input_ids=followed(begin, drawn)).logits
        return found


@dataclass(frozen=True)
class Recording:
    """One recording of 30 seconds for Whisper's own `generate`: random features, English, transcribed.

    Attributes:
        positions: Tokens of the encoder's output, to which features are padded always; the case's context.
        most_tokens: The decoder's positions.
    """

    positions: int
    most_tokens: int
    returns_cache: ClassVar = False  # of beams Whisper returns that of the best alone, of enabled models none

    def check(self, case: GenerateCase) -> None:
        """Refuse trees, other contexts than the recording's, and transcripts longer than the decoder's positions."""
        refuse_trees(case)
        if case.context != self.positions:
            raise InputError(
                f"`point={case.context}x{case.samples}`: {case.shape} encodes every recording as {self.positions} "
                f"tokens; ask for {self.positions}x{case.samples}"
            )
        if case.new_tokens > self.most_tokens - _BEGIN:
            raise InputError(
                f"`new_tokens={case.new_tokens}` is more than the {self.most_tokens - _BEGIN} that {case.shape} has "
                "positions for; ask for fewer"
            )

    def prompt_length(self, case: GenerateCase) -> int:
        """The beginning of a transcript."""
        return _BEGIN

    def arguments(self, model: PreTrainedModel, case: GenerateCase) -> dict[str, Any]:
        """Features ``[1, bins, frames]``, of which the encoder makes a token of two, language and task."""
        return {**self._features(model), "language": "en", "task": "transcribe"}

    def drawing(self, arguments: dict[str, Any], new_tokens: int) -> dict[str, Any]:
        """Of a beam search the best transcript: Whisper's `generate` searches again for each that it returns.

        Numbers of new tokens would be warned of in each call, beside the lengths that Whisper's `generate` fills in
        when there are none. It adds the beginning to the longest itself.
        """
        lengths = {"max_length": new_tokens, "min_length": _BEGIN + new_tokens}
        return arguments | lengths | ({"num_return_sequences": 1} if "num_beams" in arguments else {})

    def logits(self, model: PreTrainedModel, case: GenerateCase, drawn: Tensor) -> Tensor:
        """As `Given.logits`."""
        settings: Any = model.generation_config
        begin = drawn.new_tensor(
            [
                settings.decoder_start_token_id,
                settings.lang_to_id["<|en|>"],
                settings.task_to_id["transcribe"],
                settings.no_timestamps_token_id,
            ]
        )
        features = for_rows(self._features(model), len(drawn))
        found: Tensor = model(**features, decoder_input_ids=followed(begin[None], drawn)).logits[:, _BEGIN - 1 :]
        return found

    def _features(self, model: PreTrainedModel) -> dict[str, Tensor]:
        import torch

        generator = torch.Generator().manual_seed(0)
        features = torch.randn(1, model.config.num_mel_bins, 2 * self.positions, generator=generator)
        return {"input_features": features.to(model.device, model.dtype)}
