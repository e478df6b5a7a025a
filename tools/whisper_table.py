"""Writes a table of docs/slim-measurements.md: what slim caches cost on Whisper tiny.en's trained weights.

Run ``PYTHONPATH=.:.venv-real python -m tools.whisper_table`` from a clone, after `make test-real`, which installs the
weights and a voice.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Final

import torch

from hf_fastdecode.conversion.calibration import model_inputs, record
from hf_fastdecode.conversion.families import family_of
from hf_fastdecode.conversion.fit.attention import AttentionInputs, AttentionWeights
from hf_fastdecode.conversion.fit.layer_plan import CacheError, LayerPlan
from hf_fastdecode.conversion.layer_converter import LayerConverter, PlanChoice, below
from tests.real.speech import speak
from tests.real.trained_whisper import features, tokenizer, trained_whisper

from .pages import DOCS, replace_table
from .slim_table import FITTED, UNFITTED
from .unfitted_keys import ErrorsOfPaper

PAGE: Final = DOCS / "slim-measurements.md"
HEADER: Final = (
    f"| attention | condition of W_K | {UNFITTED}, bf16 | the same, fp16 | {FITTED}, fp16 "
    "| keys + d/8 V-coordinates, fp16 | plan | of KV's bytes | its error |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)
TEXT: Final = (
    "The train to the coast leaves at seven in the morning. Nobody had told the cook, who was still asleep, and so "
    "there was no bread on board when the rain began."
)


def table() -> str:
    """A line for each attention of the decoder; errors are of the output, over that of keys and values in bf16."""
    model = deepcopy(trained_whisper()).bfloat16()
    family = family_of(model.config)
    ids = torch.tensor(tokenizer()(TEXT)["input_ids"])
    recorded = record(model, family, model_inputs(family, model.config, ids, features(speak(TEXT))))
    own = [below(prefix, model.state_dict()) for prefix in family.attentions(model.config)]
    converter = LayerConverter(family, model.config, PlanChoice(), lambda index: (own[index], recorded[index]))
    lines = []
    for index, prefix in enumerate(family.attentions(model.config)):
        converted = converter.convert(index)
        weights = family.weights(model.config, own[index], index)
        chosen, plan = converted.chosen, converted.plan
        cells = [
            f"{prefix.split('.')[3]}, {'cross-attention' if index % 2 else 'self-attention'}",
            f"{plan.condition:.0e}",
            *(_times(one, plan) for one in _unfitted(weights, recorded[index])),
            _over(plan, "k", 0),
            _over(plan, "k+r", model.config.d_model // 8),
            chosen.plan,
            f"{chosen.bytes_per_token / plan.ordinary.bytes_per_token:.0%}",
            _times(chosen, plan),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return HEADER + "\n".join(lines) + "\n"


def _unfitted(weights: AttentionWeights, seen: AttentionInputs) -> list[CacheError]:
    """Keys alone in bf16 and fp16, on the half of the tokens on which the attention's plan is measured."""
    errors = ErrorsOfPaper(weights, seen.part(slice(len(seen.key_inputs) // 2, None)))
    return [errors.unfitted_keys(dtype) for dtype in (torch.bfloat16, torch.float16)]


def _over(plan: LayerPlan, name: str, rank: int) -> str:
    found = next((one for one in plan.candidates if (one.plan, one.rank) == (name, rank)), None)
    return "out of range" if found is None else _times(found, plan)


def _times(found: CacheError, plan: LayerPlan) -> str:
    if not found.output_error:
        return "exact"
    times = found.output_error / plan.ordinary.output_error
    return f"{times:,.{0 if times >= 10 else 1 if times >= 1 else 2}f}x"


def main() -> None:
    """Write the page's table."""
    replace_table(PAGE, "tools.whisper_table", table())


if __name__ == "__main__":
    main()
