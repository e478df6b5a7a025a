"""Writes docs/slim-measurements.md's table of the tokens that the embedded model predicts with each cache.

Run ``python -m tools.slim_tokens`` from a clone. Weights are those of the model in bf16, and all but the cache is in
fp32: nothing else makes predictions differ.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from hf_fastdecode._compat import CACHE
from hf_fastdecode.assets import embedded_tasks, few_shot_prompt, load_embedded
from hf_fastdecode.conversion.calibration import RoundedCache
from hf_fastdecode.conversion.to_slim import to_slim

from .slim_table import COORDINATES, PAGE, SHORT, UNFITTED, cache_name
from .token_agreement import (
    EXACT,
    TOKENS,
    Caches,
    Predictions,
    before_end,
    rounded_inputs,
    values_from_keys,
    write_table,
)

PROMPTS: Final = slice(24, 60)
"""Tasks that are continued; the built-in text, on which slim models are calibrated, has none of them."""

_LONGEST: Final = 192  # tokens of a solution at most


def caches() -> Caches:
    """Predictions of a text, and of solutions of tasks, that the built-in text does not have."""
    model, tokenizer = load_embedded(torch.bfloat16)
    full = load_embedded(torch.bfloat16)[0].float()
    tasks = embedded_tasks()
    text = "\n\n".join(few_shot_prompt(tasks[at + 6], tasks[at : at + 6]) for at in (24, 36, 48))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :TOKENS]
    prompts = tokenizer([few_shot_prompt(task, 1) for task in tasks[PROMPTS]], return_tensors="pt", padding=True)

    def predict(one: Any = full, dtype: torch.dtype | None = None) -> Predictions:
        forced, greedy = (None if dtype is None else RoundedCache(full.config, dtype) for _ in range(2))
        with torch.no_grad():
            logits = one(ids, **{CACHE: forced}).logits[0]
        generated = one.generate(**prompts, **{CACHE: greedy}, do_sample=False, max_new_tokens=_LONGEST)
        end = model.generation_config.eos_token_id
        return Predictions(logits, before_end(generated[:, prompts.input_ids.shape[1] :], end))

    def with_inputs(dtype: torch.dtype) -> Predictions:
        attentions = [layer.self_attn for layer in full.model.layers]
        projections = [part for one in attentions for part in (one.k_proj, one.v_proj)]
        with rounded_inputs(projections, dtype, full.config.head_dim):
            return predict()

    def with_unfitted(dtype: torch.dtype) -> Predictions:
        attentions = [layer.self_attn for layer in full.model.layers]
        with torch.no_grad(), values_from_keys(attentions, dtype, full.config.head_dim):
            return predict()

    def with_slim(dtype: torch.dtype, **choice: Any) -> Predictions:
        return predict(to_slim(model, tokenizer=tokenizer, **choice | {"cache_dtype": SHORT[dtype]}).float())

    found = {EXACT: predict}
    for dtype in (torch.bfloat16, torch.int8):
        found[cache_name(None, dtype)] = partial(predict, dtype=dtype)
    for dtype in (torch.bfloat16, torch.int8):
        found[f"inputs, {SHORT[dtype]} (emulated)"] = partial(with_inputs, dtype)
    width = model.config.hidden_size
    found[f"{UNFITTED}, bf16"] = partial(with_unfitted, torch.bfloat16)
    for dtype in (torch.float16, torch.int8):
        found[f"{UNFITTED}, {SHORT[dtype]}"] = partial(with_unfitted, dtype)
        for part in COORDINATES[:3]:
            rank = width // part if part else 0
            found[cache_name(part, dtype)] = partial(with_slim, dtype, rank=rank, tolerance=1e9)
        found[f"**the plan, {SHORT[dtype]}, tolerance 2**"] = partial(with_slim, dtype)
    return found


def main() -> None:
    """Measure, and write the table into the page."""
    write_table(PAGE, "tools.slim_tokens", caches())


if __name__ == "__main__":
    main()
