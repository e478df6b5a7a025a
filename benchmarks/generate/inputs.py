"""Inputs of a call of `generate` by shape: token ids, or for models with an encoder or images more."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hf_fastdecode.errors import InputError

from .cases import GenerateCase

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

FIRST_ID: Final = 3
"""The least id of random prompts; those below are special in many vocabularies."""
_BEGIN: Final = 4  # tokens of a transcript's beginning: start, language, task, no timestamps
BEFORE_IMAGE: Final = 16  # tokens of text before an image


class TokenIds:
    """Random token ids; of a tree, prompts that share what it says. Other inputs override what differs."""

    # Whether calls can return their whole cache, an enabled model's sharing all the same.
    returns_cache: ClassVar = True

    def check(self, case: GenerateCase) -> None:
        """Refuse, by an InputError, a case for which there is no such input."""

    def prompt_length(self, case: GenerateCase) -> int:
        """Tokens of a row before the first drawn one: with an encoder those of the decoder's prompt."""
        return case.context

    def arguments(self, model: PreTrainedModel, case: GenerateCase) -> dict[str, Any]:
        """Arguments of `generate`: ids ``[prompts, context]``, distinct after what all share, and a mask of ones."""
        import torch

        generator, vocabulary = torch.Generator().manual_seed(0), model.config.get_text_config().vocab_size
        ids = torch.randint(FIRST_ID, vocabulary, (1, case.context), generator=generator)
        if case.tree is not None:
            shared, problems = case.tree.shared, case.tree.problems
            own = torch.randint(FIRST_ID, vocabulary, (problems, case.tree.own), generator=generator)
            own[:, 0] = FIRST_ID + torch.arange(problems)
            ids = torch.cat([ids[:, :shared].expand(problems, -1), own], 1)
        ids = ids.to(model.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def drawing(self, arguments: dict[str, Any], new_tokens: int) -> dict[str, Any]:
        """Arguments that say how tokens are drawn, with those by which each sample draws exactly `new_tokens`."""
        return arguments | {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}

    def logits(self, model: PreTrainedModel, case: GenerateCase, drawn: Tensor) -> Tensor:
        """``[rows, tokens, vocabulary]``: logits, of one pass, that drawn tokens ``[rows, tokens]`` were chosen by."""
        ids = _followed(self.arguments(model, case)["input_ids"], drawn)
        found: Tensor = model(ids).logits[:, case.context - 1 :]
        return found


class _WithoutTrees(TokenIds):
    def check(self, case: GenerateCase) -> None:
        if case.tree is not None:
            raise InputError(f"`tree` is of token ids alone, {case.shape} is given more; name a `point`")


class EncodedText(_WithoutTrees):
    """Random token ids for the encoder, as many as the case's context; the decoder begins with one token."""

    def prompt_length(self, case: GenerateCase) -> int:
        return 1

    def logits(self, model: PreTrainedModel, case: GenerateCase, drawn: Tensor) -> Tensor:
        begin = drawn.new_full((1, 1), model.generation_config.decoder_start_token_id)
        encoded = _for_rows(self.arguments(model, case), len(drawn))
        found: Tensor = model(**encoded, decoder_input_ids=_followed(begin, drawn)).logits
        return found


@dataclass(frozen=True)
class Recording(_WithoutTrees):
    """One recording of 30 seconds for Whisper's own `generate`: random features, English, transcribed."""

    positions: int  # of the encoder's output, to which features are padded always: the case's context
    most_tokens: int  # positions of the decoder
    returns_cache: ClassVar = False  # of beams Whisper returns that of the best alone, of enabled models none

    def check(self, case: GenerateCase) -> None:
        """Refuse trees, other contexts than the recording's, and transcripts longer than the decoder's positions."""
        super().check(case)
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
        return _BEGIN

    def arguments(self, model: PreTrainedModel, case: GenerateCase) -> dict[str, Any]:
        """Features ``[1, bins, frames]``, of which the encoder makes a token of two, language and task."""
        return {**self._features(model), "language": "en", "task": "transcribe"}

    def drawing(self, arguments: dict[str, Any], new_tokens: int) -> dict[str, Any]:
        """Lengths, since numbers of new tokens would be warned of; Whisper adds the beginning to the longest itself.

        Of a beam search the best transcript only: Whisper's `generate` searches again for each one.
        """
        lengths = {"max_length": new_tokens, "min_length": _BEGIN + new_tokens}
        return arguments | lengths | ({"num_return_sequences": 1} if "num_beams" in arguments else {})

    def logits(self, model: PreTrainedModel, case: GenerateCase, drawn: Tensor) -> Tensor:
        settings: Any = model.generation_config
        language, task = settings.lang_to_id["<|en|>"], settings.task_to_id["transcribe"]
        begin = [settings.decoder_start_token_id, language, task, settings.no_timestamps_token_id]
        features, ids = _for_rows(self._features(model), len(drawn)), _followed(drawn.new_tensor([begin]), drawn)
        found: Tensor = model(**features, decoder_input_ids=ids).logits[:, _BEGIN - 1 :]
        return found

    def _features(self, model: PreTrainedModel) -> dict[str, Tensor]:
        import torch

        generator = torch.Generator().manual_seed(0)
        features = torch.randn(1, model.config.num_mel_bins, 2 * self.positions, generator=generator)
        return {"input_features": features.to(model.device, model.dtype)}


@dataclass(frozen=True)
class OneImage(TokenIds):
    """An image of random values among random token ids, as Qwen-VL's processors give it; the context counts both.

    Prompts of a tree have an image each, behind what all share.
    """

    tokens: int  # of an image
    returns_cache: ClassVar = False  # tokens alone do not say what it is of

    def check(self, case: GenerateCase) -> None:
        """Refuse contexts in which the image has no place between texts, and trees that share more than its text."""
        least = BEFORE_IMAGE + 1 + self.tokens + 2
        if case.context < least:
            raise InputError(
                f"`point={case.context}x{case.samples}`: the image of {case.shape} takes {self.tokens} tokens; ask "
                f"for a context of {least} or more"
            )
        if case.tree is not None and case.tree.shared > BEFORE_IMAGE:
            raise InputError(
                f"`tree={case.tree}`: prompts of {case.shape} have images of their own after {BEFORE_IMAGE} tokens; "
                "share at most these"
            )

    def arguments(self, model: PreTrainedModel, case: GenerateCase) -> dict[str, Any]:
        """Ids ``[prompts, context]`` and a mask of ones, which of them stand for images, and these."""
        import torch

        config: Any = model.config
        before, image, after = self.special(config)
        ids = super().arguments(model, case)["input_ids"] % (min(before, image, after) - FIRST_ID) + FIRST_ID
        end = BEFORE_IMAGE + 1 + self.tokens
        ids[:, BEFORE_IMAGE], ids[:, end], ids[:, BEFORE_IMAGE + 1 : end] = before, after, image
        generator = torch.Generator().manual_seed(0)
        images = {
            name: value.to(model.device, model.dtype if value.is_floating_point() else None)
            for name, value in self._images(config, case.prompts, generator).items()
        }
        return {**self._of_ids(ids, config), **images}

    def logits(self, model: PreTrainedModel, case: GenerateCase, drawn: Tensor) -> Tensor:
        given = self.arguments(model, case)
        ids = _followed(given["input_ids"], drawn)
        found: Tensor = model(**_for_rows(given, len(drawn)) | self._of_ids(ids, model.config)).logits
        return found[:, case.context - 1 :]

    def special(self, config: Any) -> tuple[int, int, int]:
        """Ids of tokens: before an image, in its place, and behind it."""
        return config.vision_start_token_id, config.image_token_id, config.vision_end_token_id

    def _images(self, config: Any, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Patches of all images and their grids; four patches are a token."""
        import torch

        vision = config.vision_config
        side = isqrt(self.tokens) * vision.spatial_merge_size
        numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        patches = torch.randn(count * side**2, numbers, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, side, side]]).repeat(count, 1)}

    def _of_ids(self, ids: Tensor, config: Any) -> dict[str, Tensor]:
        """The ids, with a mask, and which of them stand for images."""
        marked = (ids == self.special(config)[1]).int()
        return {"input_ids": ids, "attention_mask": ids.new_ones(ids.shape), self._marks: marked}

    _marks: ClassVar = "mm_token_type_ids"


@dataclass(frozen=True)
class GemmaImage(OneImage):
    """The same as Gemma 3's processors give it, whose images are all of one size."""

    _marks: ClassVar = "token_type_ids"

    def special(self, config: Any) -> tuple[int, int, int]:
        return config.boi_token_index, config.image_token_index, config.eoi_token_index

    def _images(self, config: Any, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        import torch

        vision = config.vision_config
        sizes = vision.num_channels, vision.image_size, vision.image_size
        return {"pixel_values": torch.randn(count, *sizes, generator=generator)}


def _followed(prompt: Tensor, drawn: Tensor) -> Tensor:
    """A prompt ``[1, width]`` with what each row drew but its last token: ``[rows, width + tokens - 1]``."""
    import torch

    return torch.cat([prompt.expand(len(drawn), -1), drawn[:, :-1]], 1)


def _for_rows(given: dict[str, Any], rows: int) -> dict[str, Any]:
    return {name: value.repeat(rows, *[1] * (value.dim() - 1)) for name, value in given.items()}
