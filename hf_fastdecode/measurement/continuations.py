"""The text that generated tokens add to a prompt, and the tokens that end it."""

from __future__ import annotations

from typing import Any, Final

ANCHOR: Final = 4
"""Prompt tokens decoded before a completion, so that its first space is kept."""


def end_tokens_of(model: Any) -> list[int]:
    """The ids that end a completion."""
    end = model.generation_config.eos_token_id
    return [] if end is None else [end] if isinstance(end, int) else list(end)


def continuation(tokenizer: Any, prompt: list[int], ids: list[int]) -> str:
    """The text that these tokens add to their prompt's; tokenizers strip a space from the start of a text."""

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    before = text(prompt[-ANCHOR:])
    both = text(prompt[-ANCHOR:] + ids)
    return both[len(before) :] if both.startswith(before) else text(ids)
