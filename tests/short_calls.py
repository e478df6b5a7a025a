"""A short call of `generate`, where what it computes is not the matter."""

from .tiny_models import ragged_prompts

PROMPT = ragged_prompts(80)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 6}
