"""A tiny model, prompts that share at two levels, and how calls of it are timed."""

from __future__ import annotations

import torch

from benchmarks.workloads.measure import Timing
from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.measurement import SAMPLING

from ...tiny_models import VOCABULARY, tiny_model

SHARED = 70
OWN = (45, 40, 61)
QUICK = Timing(3, 1, 1e-9, SAMPLING)
QUICK_GREEDY = Timing(3, 1, 1e-9, {"do_sample": False})


def problem_tokens() -> list[list[int]]:
    """Prompts that begin with `SHARED` tokens and go on differently, `OWN` more each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (SHARED + sum(OWN),), generator=generator).tolist()
    shared, rest = ids[:SHARED], ids[SHARED:]
    prompts = []
    for number, own in enumerate(OWN):
        prompts.append([*shared, 3 + number, *rest[1:own]])
        rest = rest[own:]
    return prompts


def reading_model():
    """A tiny model that knows the embedded tokenizer's tokens, and that tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    return tiny_model("llama-gqa", vocab_size=len(tokenizer), max_position_embeddings=2048), tokenizer
