"""The calls: tiny random models from configs, those of the tests, with every feature that changes how a call runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel as Model

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.kernels.device import triton_is_installed
from tests.architectures.classes import tiny_model_of
from tests.generation.mllama_calls import mllama
from tests.generation.mllama_calls import prompts as mllama_prompts
from tests.image_inputs import prompts_with_images
from tests.patches import encoder_decoder_models, family_models, multimodal_models
from tests.patches.slim_models import TEXT
from tests.tiny_models import ragged_prompts, seeded, tiny_model

Arguments = dict[str, Any]

SAMPLES: Final[Arguments] = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 8}
GREEDY: Final[Arguments] = {"do_sample": False, "max_new_tokens": 8}
BEAMS: Final[Arguments] = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6}
BEAM_SAMPLES: Final[Arguments] = {"do_sample": True, "top_k": 0, "num_beams": 3, "max_new_tokens": 6}
ENDS: Final[Arguments] = {"eos_token_id": list(range(3, 16)), "max_new_tokens": 16}
DICT: Final[Arguments] = {"return_dict_in_generate": True}
SCORES: Final[Arguments] = {**DICT, "output_scores": True, "output_logits": True}
CHAIN: Final[Arguments] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
ONE, RAGGED, ALIKE = ragged_prompts(80), ragged_prompts(57, 71, 64, shared=40), ragged_prompts(50, 50, 33, shared=32)
GRAPH: Final[Arguments] = {"mode": "graph", "backend": "triton"}
SMALL: Final[Arguments] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Interpreting takes time by the program: one for each layer, KV head and row."""
SHORT: Final = ragged_prompts(24, 19, shared=17)
FEW: Final[Arguments] = SAMPLES | {"num_return_sequences": 2, "max_new_tokens": 4}


@dataclass(frozen=True)
class Call:
    """A call of `generate`.

    Attributes:
        make: Makes the model.
        prompts: The prompts, or what makes them of the model.
        arguments: Further arguments, or what makes them of the enabled model, as of a kept cache.
        options: Of `enable`.
        times: How often the call runs; what is recorded is of all of them, and the report of the last.
    """

    make: Callable[[], Model]
    prompts: Mapping[str, Any] | Callable[[Model], Mapping[str, Any]]
    arguments: Arguments | Callable[[Model], Arguments]
    options: Arguments = field(default_factory=dict)
    times: int = 1


def tiny(name: str = "llama-gqa", **fields: Any) -> Callable[[], Model]:
    return lambda: tiny_model(name, **fields)


def of_class(name: str) -> Callable[[], Model]:
    return lambda: tiny_model_of(name)


def images(model: Model) -> Mapping[str, Tensor]:
    return prompts_with_images(model, (5, (4, 4), 9), (3, (4, 8, 1), 12))


def tree() -> dict[str, Tensor]:
    """Six prompts that all begin alike, and then by pairs."""
    pairs = [ragged_prompts(30, 25, shared=20, seed=seed)["input_ids"] for seed in (1, 2, 3)]
    head = ragged_prompts(40, seed=4)["input_ids"].expand(2, -1)
    ids = torch.cat([torch.cat([head, pair], 1) for pair in pairs])
    mask = (ids != 0).long()
    order = mask.argsort(dim=1, stable=True)  # padding goes to the left
    return {"input_ids": ids.gather(1, order), "attention_mask": mask.gather(1, order)}


def kept(length: int, prompts: Mapping[str, Tensor] = ONE, **arguments: Any) -> Callable[[Model], Arguments]:
    """Over a cache of the prompts' first tokens."""
    return lambda model: {**arguments, CACHE: fd.prefill(model, prompts["input_ids"][:, :length].to(model.device))}


def returned(model: Model) -> Arguments:
    """Over the cache that another call returned."""
    first = {name: one[:, :60].to(model.device) for name, one in ONE.items()}
    return SAMPLES | {CACHE: seeded(lambda: model.generate(**first, **SAMPLES, **DICT))[CACHE]}


def assisted(model: Model) -> Arguments:
    drafter = tiny_model(seed=3).to(model.device, model.dtype)
    return GREEDY | {"assistant_model": drafter, CACHE: fd.prefill(model, ONE["input_ids"].to(model.device))}


def stopping(model: Model) -> Arguments:
    return SAMPLES | {"stop_strings": ["("], "tokenizer": fd.load_embedded()[1], "max_new_tokens": 12}


def code(model: Model) -> Mapping[str, Tensor]:
    return dict(fd.load_embedded()[1]("def add(a, b):\n    return a + b\n\n\n" * 8 + "def", return_tensors="pt"))


def logged(model: Model) -> Arguments:
    return SAMPLES | {"logits_processor": [fd.TokenLogProbs()]}


def embedded_prompts(model: Model) -> Mapping[str, Tensor]:
    return {"inputs_embeds": model.get_input_embeddings()(RAGGED["input_ids"].to(model.device)).detach()} | {
        "attention_mask": RAGGED["attention_mask"]
    }


def adapted() -> Model:
    """With a LoRA adapter, where PEFT is installed."""
    peft = import_module("peft")

    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model: Model = peft.get_peft_model(tiny_model(), config).eval()
    return model


def slim(name: str, plan: str) -> Callable[[], Model]:
    return lambda: family_models.family_pair(name, plan)[1]


def slim_llava() -> Model:
    return to_slim(multimodal_models.multimodal_model("llava"), TEXT, plan="k")


def encoder(name: str, plan: str | None = None, **fields: Any) -> Callable[[], Model]:
    if plan is None:
        return lambda: encoder_decoder_models.encoder_decoder(name, **fields)
    return lambda: encoder_decoder_models.encoder_decoder_pair(name, plan)[1]


def calls() -> dict[str, Call]:
    """All calls by name."""
    text = {
        "samples": Call(tiny(), ONE, SAMPLES),
        "samples, default options": Call(tiny(), ONE, SAMPLES, {"min_saved_tokens": "auto"}),
        "ragged prompts, greedy": Call(tiny(), RAGGED, GREEDY),
        "prompts x samples": Call(tiny(), RAGGED, SAMPLES),
        "prefix tree": Call(tiny(), tree(), SAMPLES, {"min_shared_tokens": 8}),
        "beams": Call(tiny(), RAGGED, BEAMS),
        "beam samples": Call(tiny(), RAGGED, BEAM_SAMPLES),
        "scores": Call(tiny(), RAGGED, SAMPLES | SCORES),
        "beams with scores": Call(tiny(), ONE, BEAMS | SCORES),
        "hidden states": Call(tiny(), RAGGED, GREEDY | DICT | {"output_hidden_states": True}),
        "processors": Call(tiny(), RAGGED, SAMPLES | CHAIN),
        "token log-probs": Call(tiny(), RAGGED, logged),
        "rows that end": Call(tiny(), RAGGED, SAMPLES | ENDS),
        "rows that take places": Call(tiny(), RAGGED, SAMPLES | ENDS, {"max_rows": 4}),
        "waves, stop strings": Call(lambda: fd.load_embedded()[0], code, stopping, {"max_rows": 2}),
        "embedded model": Call(lambda: fd.load_embedded()[0], code, SAMPLES | {"num_return_sequences": 8}),
        "prompt in chunks": Call(tiny(), RAGGED, SAMPLES, {"max_prefill_tokens": 32}),
        "prompts as embeddings": Call(tiny(), embedded_prompts, SAMPLES),
        "prefilled": Call(tiny(), ONE, kept(80, **SAMPLES)),
        "prefilled in part": Call(tiny(), RAGGED, kept(40, RAGGED, **BEAMS)),
        "returned cache": Call(tiny(), ONE, returned),
        "reused prefix": Call(tiny(), ONE, SAMPLES, {"reuse_prefix": True}, times=2),
        "prompt lookup": Call(tiny(), ONE, kept(80, **GREEDY, prompt_lookup_num_tokens=3)),
        "assisted": Call(tiny(), ONE, assisted),
        "plain operators": Call(tiny(), ONE, SAMPLES, {"backend": "plain"}),
        "LoRA": Call(adapted, RAGGED, SAMPLES),
        "static cache": Call(tiny(), ONE, SAMPLES | DICT | {"cache_implementation": "static"}),
        "no cache": Call(tiny(), ONE, SAMPLES | {"use_cache": False}),
    }
    decoders = ("gpt2", "qwen2_moe", "mistral-window", "gemma2", "gpt_oss", "gemma4_text", "mimo_v2_flash", "laguna")
    text |= {name: Call(tiny(name), RAGGED, SAMPLES) for name in decoders}
    text["window, prefilled"] = Call(tiny("gemma3_text"), ONE, kept(60, **SAMPLES))
    own = ("Bloom", "GPTNeo", "DeepseekV2", "DeepseekV3", "MiniCPM3")
    states = ("Qwen3Next", "Mamba2", "FalconH1", "KimiLinear", "MiniMax")
    begin_alike = {"min_shared_tokens": 8}
    text |= {name: Call(of_class(f"{name}ForCausalLM"), ALIKE, SAMPLES, begin_alike) for name in own + states}
    hybrid, latents = of_class("Qwen3NextForCausalLM"), of_class("DeepseekV2ForCausalLM")
    qwen = of_class("Qwen2_5_VLForConditionalGeneration")
    given = {
        "states, beams": Call(hybrid, ALIKE, BEAMS, begin_alike),
        "states, reused prefix": Call(hybrid, ALIKE, SAMPLES, {"reuse_prefix": True}, times=2),
        "latents, prefilled": Call(latents, ONE, kept(60, **BEAMS)),
        "images": Call(qwen, images, SAMPLES),
        "images, beams": Call(of_class("Gemma3ForConditionalGeneration"), images, BEAMS),
        "images, prefilled": Call(qwen, images, lambda model: SAMPLES | {CACHE: fd.prefill(model, images(model))}),
        "images, states": Call(of_class("Qwen3_5ForConditionalGeneration"), images, SAMPLES),
        "images of layers": Call(mllama, mllama_prompts(0, 3, 1), SAMPLES),
        "T5": Call(encoder("t5"), encoder_decoder_models.read_by, SAMPLES),
        "Bart, beams": Call(encoder("bart"), encoder_decoder_models.read_by, BEAMS),
        "Whisper": Call(encoder("whisper"), encoder_decoder_models.read_by, SAMPLES),
        "slim Qwen2": Call(slim("qwen2", "k+r"), RAGGED, SAMPLES),
        "slim GPT-2 of inputs, beams": Call(slim("gpt2", "x"), RAGGED, BEAMS),
        "slim T5 of encoder outputs": Call(encoder("t5", "e"), encoder_decoder_models.read_by, SAMPLES),
        "slim LLaVA": Call(slim_llava, multimodal_models.inputs, SAMPLES),
    }
    if torch.cuda.is_available():
        return text | given
    reads = encoder_decoder_models.read_by
    captured = {
        "samples": Call(tiny(**SMALL), SHORT, FEW, times=2),
        "beams": Call(tiny(**SMALL), SHORT, BEAMS | {"max_new_tokens": 3}),
        "window": Call(tiny("mistral-window", **SMALL, sliding_window=9), SHORT, FEW),
        "prompt lookup": Call(tiny(**SMALL), ONE, kept(79, max_new_tokens=4, prompt_lookup_num_tokens=3)),
        "states": Call(hybrid, SHORT, FEW),
        "latents": Call(latents, SHORT, FEW | {"max_new_tokens": 3}),
        "encoder": Call(encoder("t5", num_decoder_layers=1), reads, FEW),
        "slim": Call(slim("gpt2", "k"), SHORT, FEW),
    }
    if not triton_is_installed():
        captured = {}
    return text | given | {f"{name}, captured": replace(call, options=GRAPH) for name, call in captured.items()}
