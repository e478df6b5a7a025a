"""Slim layers that cache in 8 bits: as accurate as was measured, in transformers' own loops and caches."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.calibration import RoundedCache, model_inputs, record
from hf_fastdecode.conversion.families import family_of
from hf_fastdecode.conversion.fit.cached_numbers import stored_bytes
from hf_fastdecode.conversion.fit.layer_plan import CacheErrors
from hf_fastdecode.conversion.fit.value_coordinates import key_statistics
from hf_fastdecode.conversion.to_slim import to_slim

from ..conversion.fit.references import attention_output
from ..tiny_models import ragged_prompts, seeded, tiny_model
from .family_models import family_model
from .slim_models import PLANS, TEXT, pair, relative

PROMPTS = ragged_prompts(9, 31, 20)


@lru_cache
def slim_in(cache_dtype: str, plan: str = "k+r") -> PreTrainedModel:
    """A tiny slim model in fp32, whatever the error of its cache is; not to be changed."""
    return to_slim(pair()[0], TEXT, plan=PLANS[plan], cache_dtype=cache_dtype, tolerance=1e9)


def generate(model: PreTrainedModel, **options: Any) -> Any:
    settings = {"max_new_tokens": 16, "do_sample": False, **PROMPTS, **options}
    return seeded(lambda: model.generate(**settings, return_dict_in_generate=True))


@lru_cache
def greedy_without_cache(cache_dtype: str, plan: str) -> Any:
    """What every greedy call with a cache is compared with."""
    return generate(slim_in(cache_dtype, plan), use_cache=False)


@pytest.mark.parametrize("plan", ["k", "k+r"])
@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 7},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"input_ids": PROMPTS["input_ids"][1:2], "attention_mask": None, "prompt_lookup_num_tokens": 4},
    ],
    ids=lambda options: "-".join(name for name in options if "mask" not in name) or "greedy",
)
def test_caches_of_transformers_hold_it(cache_dtype: str, plan: str, options: dict[str, Any]) -> None:
    """Against the same model without a cache, whose keys and coordinates have the same 8 bits."""
    slim = slim_in(cache_dtype, plan)
    without = {name: one for name, one in options.items() if name in ("num_beams", "do_sample", "input_ids")}
    without |= {name: one for name, one in options.items() if name in ("attention_mask", "num_return_sequences")}
    expected = generate(slim, use_cache=False, **without) if without else greedy_without_cache(cache_dtype, plan)
    assert torch.equal(generate(slim, **options).sequences, expected.sequences)


def test_a_sliding_window() -> None:
    slim = to_slim(family_model("phi3-window"), TEXT, plan="k", cache_dtype="int8", tolerance=1e9)
    prompts = {**ragged_prompts(30, 70), "output_logits": True}
    expected = generate(slim, use_cache=False, **prompts)
    for options in ({}, {"cache_implementation": "static"}):
        found = generate(slim, **prompts, **options)
        same = (found.sequences == expected.sequences)[:, 70:].cumprod(-1).bool()
        assert same[:, :8].all()  # later ones may have two tokens that are as likely, but for the last bit of 8
        step = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1)  # whose tokens so far are the same
        logits = (torch.stack(one.logits, 1)[step] for one in (found, expected))
        assert relative(*logits) < 0.01


def test_repeated_selected_and_cropped_rows() -> None:
    slim = slim_in("int8")
    cache = DynamicCache(config=slim.config)
    with torch.no_grad():
        slim(TEXT[:20].view(2, 10), **{CACHE: cache})
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([3, 0]))
        cache.crop(-2)
        found = slim(TEXT[20:24].view(2, 2), **{CACHE: cache}).logits
        ids = torch.cat([TEXT[:20].view(2, 10)[[1, 0], :8], TEXT[20:24].view(2, 2)], 1)
        assert relative(found, slim(ids).logits[:, 8:]) < 1e-5


def test_cached_bytes_are_those_reported() -> None:
    slim = slim_in("int8")
    for cache in (DynamicCache(config=slim.config), StaticCache(config=slim.config, max_cache_len=10)):
        with torch.no_grad():
            slim(TEXT[None, :10], **{CACHE: cache})
        sizes = [(layer.keys.nbytes + layer.values.nbytes) // 10 for layer in cache.layers]
        assert {layer.keys.dtype for layer in cache.layers} == {torch.uint8}
        assert sizes == [stored_bytes(64, torch.int8, 16) + stored_bytes(rank, torch.int8, 16) for rank in (4, 9)]
        assert sizes == [64 + 8 + 4 + 2, 64 + 8 + 9 + 2]


@pytest.mark.parametrize("name", ["llama-mha", "gpt2", "cohere-norm"])
@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_the_error_that_was_measured_is_the_models(name: str, cache_dtype: str) -> None:
    """Of a layer's output, on the inputs that the layer had."""
    model = tiny_model(name) if name == "llama-mha" else family_model(name)
    slim = to_slim(model, TEXT, rank=4, cache_dtype=cache_dtype, tolerance=1e9)
    family, dtype = family_of(model.config), getattr(torch, slim.config.slim_layers[1]["cache_dtype"])
    prefix = family.layer_prefix(1) + family.attention
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.append(((kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[0], output[0][0]))

    with slim.get_submodule(prefix.rstrip(".")).register_forward_hook(keep, with_kwargs=True), torch.no_grad():
        slim(TEXT[None])
    own = {key.removeprefix(prefix): one for key, one in model.state_dict().items() if key.startswith(prefix)}
    weights = family.weights(model.config, family.plain(model.config, own), 1)
    rotation = family.rotation(model.config, len(TEXT))
    fitted = record(model, family, model_inputs(family, model.config, TEXT))[1].inputs[: len(TEXT) // 2]
    (inputs, output), bias = seen[0], 0 if weights.output_bias is None else weights.output_bias.double()
    oracle = attention_output(weights, inputs, rotation=rotation)
    measured = CacheErrors(weights, inputs, rotation=rotation).value_coordinates(
        key_statistics(weights, fitted, dtype), 4, dtype, matrix_dtype=torch.float32
    )
    assert relative(output - bias, oracle - bias) == pytest.approx(measured.output_error, rel=0.02)


def test_within_the_tolerance_of_int8_keys_and_values() -> None:
    """Logits, against the ordinary model with a cache of int8 keys and values, as the layers were held to."""
    model = pair()[0]
    slim = to_slim(model, TEXT, cache_dtype="int8")
    assert [layer["cache_dtype"] for layer in slim.config.slim_layers] == ["int8", "int8"]
    with torch.no_grad():
        oracle = model(TEXT[None]).logits
        found = slim(TEXT[None]).logits
        int8 = model(TEXT[None], **{CACHE: RoundedCache(model.config, torch.int8)}).logits
    assert relative(found, oracle) < 2 * relative(int8, oracle)


def test_keys_alone_in_int8_stay_in_16_bits() -> None:
    """Their noise grows in the values by W_K's condition number: no plan of them is within the tolerance."""
    slim = to_slim(tiny_model("llama-mha").bfloat16(), TEXT, plan="k", cache_dtype="int8")
    assert all("cache_dtype" not in layer for layer in slim.config.slim_layers)


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8", "fp16"])
def test_saved_and_loaded(cache_dtype: str, tmp_path: Path) -> None:
    slim = slim_in(cache_dtype)
    slim.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.slim_layers == slim.config.slim_layers
    with torch.no_grad():
        assert torch.equal(loaded(TEXT[None]).logits, slim(TEXT[None]).logits)


def test_forced_16_bits() -> None:
    for cache_dtype, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        cache = generate(slim_in(cache_dtype), max_new_tokens=1)[CACHE]
        assert {layer.keys.dtype for layer in cache.layers} == {dtype}


def test_training_is_refused() -> None:
    slim = to_slim(pair()[0], TEXT, plan="k", cache_dtype="int8", tolerance=1e9).train()
    with pytest.raises(ValueError, match=r"layer 0 caches in int8, through which no gradients flow; call eval\(\)"):
        slim(TEXT[None, :40])
