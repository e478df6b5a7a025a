"""What a call of `generate` is given of a shape, as a protocol; token ids, which most shapes are given alone.

The bench knows nothing else of an encoder or of images: a shape that has these names its class of this protocol, and
the ways, the check of ways and the times are the same for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from hf_fastdecode.errors import InputError

from ..cases import GenerateCase

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

FIRST_ID: Final = 3
"""The least id of random prompts; those below are special in many vocabularies."""


class Given(Protocol):
    """What a call is given of its prompts, and where the drawn tokens begin.

    Attributes:
        returns_cache: Whether calls can return their whole cache, those of an enabled model sharing context all the
            same.
    """

    @property
    def returns_cache(self) -> bool: ...

    def check(self, case: GenerateCase) -> None:
        """Refuse, by an InputError, a case for which there is no such input."""

    def prompt_length(self, case: GenerateCase) -> int:
        """Tokens of a row before the first drawn one: with an encoder those of the decoder's prompt."""

    def arguments(self, model: PreTrainedModel, case: GenerateCase) -> dict[str, Any]:
        """Arguments of `generate`, tensors with one row per prompt."""

    def drawing(self, arguments: dict[str, Any], new_tokens: int) -> dict[str, Any]:
        """Arguments that say how tokens are drawn, so many for each sample, as this model's `generate` takes them.

        Args:
            arguments: How tokens are drawn, and for how many samples.
            new_tokens: Tokens of each sample, no fewer and no more.
        """

    def logits(self, model: PreTrainedModel, case: GenerateCase, drawn: Tensor) -> Tensor:
        """The logits that each drawn token was chosen by, of one pass without a cache.

        Args:
            model: The model.
            case: A case of one prompt.
            drawn: ``[rows, tokens]`` int64: what was drawn after the prompt.

        Returns:
            ``[rows, tokens, vocabulary]``.
        """


class TokenIds:
    """Random token ids; of a tree, prompts that share what it says."""

    returns_cache = True

    def check(self, case: GenerateCase) -> None:
        """Any case will do."""

    def prompt_length(self, case: GenerateCase) -> int:
        """The whole prompt."""
        return case.context

    def arguments(self, model: PreTrainedModel, case: GenerateCase) -> dict[str, Any]:
        """Ids ``[prompts, context]``, no two of which go on alike after what all share, and a mask of ones."""
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
        """As they are, with the number of new tokens."""
        return of_length(arguments, new_tokens)

    def logits(self, model: PreTrainedModel, case: GenerateCase, drawn: Tensor) -> Tensor:
        """As `Given.logits`."""
        ids = followed(self.arguments(model, case)["input_ids"], drawn)
        found: Tensor = model(ids).logits[:, case.context - 1 :]
        return found


def refuse_trees(case: GenerateCase) -> None:
    """Raise an InputError for a tree of prompts, which shapes with an input of another kind do not have."""
    if case.tree is not None:
        raise InputError(f"`tree` is of token ids alone, {case.shape} is given more; name a `point`")


def of_length(arguments: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    """Arguments of `generate`, with those by which each sample draws so many tokens."""
    return arguments | {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}


def followed(prompt: Tensor, drawn: Tensor) -> Tensor:
    """A prompt ``[1, width]`` with what each row drew but its last token: ``[rows, width + tokens - 1]``."""
    import torch

    return torch.cat([prompt.expand(len(drawn), -1), drawn[:, :-1]], 1)


def for_rows(given: dict[str, Any], rows: int) -> dict[str, Any]:
    """Tensors of one prompt, repeated for so many rows."""
    return {name: value.repeat(rows, *[1] * (value.dim() - 1)) for name, value in given.items()}
