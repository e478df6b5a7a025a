"""Classes with images, the images of their prompts, and calls of them."""

from __future__ import annotations

from ..tiny_models import seeded

CLASSES = [
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",  # with layers that have states
]
CALLS = {
    "greedy": {"do_sample": False},
    "samples": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "one sample": {"do_sample": True, "top_k": 0},
}
SMALL, TALL, WIDE = (4, 4), (8, 4, 1), (4, 6, 2)
SEVERAL = [(5, SMALL, 9), (3, TALL, 4, WIDE, 7), (12,)]
TOWERS = {
    "Qwen3VLForConditionalGeneration": "visual",
    "LlavaForConditionalGeneration": "vision_tower",
    "Gemma3ForConditionalGeneration": "vision_tower",
    "Idefics3ForConditionalGeneration": "vision_model",
}

WITH_STATES_TOO = [*[name for name in TOWERS if "Idefics" not in name], "Qwen3_5ForConditionalGeneration"]


def run(model, inputs, call):
    return seeded(lambda: model.generate(**inputs, **CALLS[call], max_new_tokens=8))
