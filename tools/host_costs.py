"""Measures what sharing costs a call on the CPU, and writes the table of docs/limits.md from it.

Of tiny models, whose arithmetic takes next to no time, calls that share and stock ones are timed in turns, with few and
many layers and steps. What sharing takes longer is ``call + step * steps + layer * steps * layers``.

Run ``python -m tools.host_costs`` from a clone; the constants of `generation/prompts/host_costs.py` are what it prints.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, set_seed

import hf_fastdecode as fd
from tests.architectures.classes import class_named
from tests.architectures.overrides import OVERRIDES
from tests.architectures.shrink import TOKENS, shrunken
from tests.image_inputs import prompts_with_images

KINDS = {
    "keys and values": "LlamaForCausalLM",
    "images": "Qwen2_5_VLForConditionalGeneration",
    "images (3)": "Qwen3VLForConditionalGeneration",
    "states": "Qwen3_5ForCausalLM",
    "latents": "DeepseekV3ForCausalLM",
    "an encoder": "T5ForConditionalGeneration",
}
FEW, MANY, ROWS, REPEATS = 2, 6, 8, 5
STEPS = 32


def model_of(name: str, layers: int) -> PreTrainedModel:
    kind = class_named(name)
    config = shrunken(kind.config_class, OVERRIDES.get(name, {}))
    text = config.get_text_config(decoder=True)
    for where in {id(config): config, id(text): text}.values():
        for field in ("num_hidden_layers", "num_decoder_layers"):
            if getattr(where, field, None):
                setattr(where, field, layers)
        if getattr(where, "layer_types", None):
            where.layer_types = (list(where.layer_types) * layers)[:layers]
    model = kind(config).eval()
    model.generation_config = GenerationConfig(**TOKENS | {"eos_token_id": None})
    return model


def inputs_of(model: PreTrainedModel, kind: str) -> dict[str, Tensor]:
    if "image" in kind:
        return prompts_with_images(model, [24, (4, 4), 24])
    return {"input_ids": torch.randint(3, 60, (1, 52))}


def loss(model: PreTrainedModel, inputs: dict[str, Tensor], tokens: int) -> tuple[float, float]:
    """Median seconds that sharing takes longer than stock, and stock's."""

    def seconds() -> float:
        set_seed(0)
        begin = time.process_time()
        model.generate(
            **inputs, do_sample=True, num_return_sequences=ROWS, max_new_tokens=tokens, min_new_tokens=tokens
        )
        return time.process_time() - begin

    pairs = []
    for repeat in range(REPEATS + 1):
        stock = seconds()
        with fd.enabled(model, min_saved_tokens=0):
            seconds()
            pairs.append((seconds(), stock))
            assert fd.explain(model).last_call.path == "shared", fd.explain(model).last_call.reason
    shared, stock = (min(one) for one in zip(*pairs[1:], strict=True))
    return shared - stock, stock


def main() -> None:
    torch.set_num_threads(1)
    for kind, name in KINDS.items():
        few, many = model_of(name, FEW), model_of(name, MANY)
        given = inputs_of(few, kind)
        (c2, s2), (c6, s6) = (loss(m, given, 1) for m in (few, many))
        (d2, t2), (d6, t6) = (loss(m, given, 1 + STEPS) for m in (few, many))
        layer = ((d6 - c6) - (d2 - c2)) / STEPS / (MANY - FEW)
        step = (d2 - c2) / STEPS - FEW * layer
        print(
            f"{kind:18} call {1e3 * c2:.2f}/{1e3 * c6:.2f} ms step {1e6 * step:.0f} us layer {1e6 * layer:.0f} us | stock: {1e3 * s2:.1f} {1e3 * s6:.1f} {1e3 * t2:.1f} {1e3 * t6:.1f} params {sum(p.numel() for p in few.parameters())}",
            flush=True,
        )


if __name__ == "__main__":
    main()
