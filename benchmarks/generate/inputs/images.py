"""One image in a text, as the processors of Qwen-VL's kind give them: patches, their grid, and placeholder tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hf_fastdecode.errors import InputError

from ..cases import GenerateCase
from .given import FIRST_ID, followed, for_rows, of_length, refuse_trees

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_BEFORE = 16  # tokens of text before the image
_MERGED = 2  # patches along each side that become a token


@dataclass(frozen=True)
class OneImage:
    """An image of random values among random token ids; the case's context counts both.

    Attributes:
        side: Patches along each side; four of them are a token of the prompt.
    """

    side: int
    returns_cache: ClassVar = False  # tokens alone do not say what it is of

    @property
    def tokens(self) -> int:
        """Tokens of the prompt that stand for the image."""
        return (self.side // _MERGED) ** 2

    def check(self, case: GenerateCase) -> None:
        """Refuse trees, and contexts in which the image has no place between texts."""
        refuse_trees(case)
        least = _BEFORE + 1 + self.tokens + 2
        if case.context < least:
            raise InputError(
                f"`point={case.context}x{case.samples}`: the image of {case.shape} takes {self.tokens} tokens; ask "
                f"for a context of {least} or more"
            )

    def prompt_length(self, case: GenerateCase) -> int:
        """The whole prompt."""
        return case.context

    def arguments(self, model: PreTrainedModel, case: GenerateCase) -> dict[str, Any]:
        """Ids ``[1, context]`` and a mask of ones, which of them stand for the image, its patches and their grid."""
        import torch

        config: Any = model.config
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(FIRST_ID, config.vision_start_token_id, (1, case.context), generator=generator)
        end = _BEFORE + 1 + self.tokens
        ids[:, _BEFORE], ids[:, end] = config.vision_start_token_id, config.vision_end_token_id
        ids[:, _BEFORE + 1 : end] = config.image_token_id
        vision = config.vision_config
        numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        patches = torch.randn(self.side**2, numbers, generator=generator)
        ids = ids.to(model.device)
        return {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == config.image_token_id).int(),
            "pixel_values": patches.to(model.device, model.dtype),
            "image_grid_thw": torch.tensor([[1, self.side, self.side]], device=model.device),
        }

    def drawing(self, arguments: dict[str, Any], new_tokens: int) -> dict[str, Any]:
        """As they are, with the number of new tokens."""
        return of_length(arguments, new_tokens)

    def logits(self, model: PreTrainedModel, case: GenerateCase, drawn: Tensor) -> Tensor:
        """As `Given.logits`."""
        of_prompt = self.arguments(model, case)
        given, ids = for_rows(of_prompt, len(drawn)), followed(of_prompt["input_ids"], drawn)
        given["input_ids"], given["attention_mask"] = ids, ids.new_ones(ids.shape)
        given["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
        found: Tensor = model(**given).logits[:, case.context - 1 :]
        return found
