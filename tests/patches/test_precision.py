"""Slim models in 8 bits, in half precision, and trained: as accurate as was measured in the dtype that they run in."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch
from matplotlib import pyplot
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, StaticCache

from hf_fastdecode._compat import CACHE
from hf_fastdecode.assets import embedded_tasks, few_shot_prompt, load_embedded
from hf_fastdecode.conversion.calibration import RoundedCache, calibration_ids, model_inputs, record
from hf_fastdecode.conversion.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.families import family_of
from hf_fastdecode.conversion.fit.attention import AttentionInputs
from hf_fastdecode.conversion.fit.cached_numbers import stored_bytes
from hf_fastdecode.conversion.fit.layer_plan import CacheErrors
from hf_fastdecode.conversion.fit.value_coordinates import key_statistics
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.patches.layers.family import language_config, longest_text

from ..cases import exhaustive_but
from ..cli.command_line import needs_weights, run
from ..conversion.checkpoints import VOCABULARY, saved
from ..conversion.fit.references import attention_output
from ..tiny_models import ragged_prompts, seeded, tiny_model
from .encoder_decoder_models import MODELS, encoder_decoder
from .family_models import FAMILIES, family_model
from .multimodal_models import MULTIMODAL, multimodal_model
from .slim_models import PLANS, TEXT, pair, relative

PROMPTS = ragged_prompts(9, 31, 20)


@lru_cache
def slim_in(cache_dtype: str, plan: str = "k+r") -> PreTrainedModel:
    """A tiny slim model in fp32, whatever the error of its cache is; not to be changed."""
    return to_slim(pair()[0], TEXT, plan=PLANS[plan], cache_dtype=cache_dtype, tolerance=1e9)


def generate(model: PreTrainedModel, **options: Any) -> Any:
    settings = {"max_new_tokens": 8, "do_sample": False, **PROMPTS, **options}
    return seeded(lambda: model.generate(**settings, return_dict_in_generate=True))


@lru_cache
def greedy_without_cache(cache_dtype: str, plan: str) -> Any:
    """Greedy tokens that calls with a cache are compared with."""
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
    """The error is of a layer's output, on the inputs that the layer had."""
    model = tiny_model(name) if name == "llama-mha" else family_model(name)
    slim = to_slim(model, TEXT, rank=4, cache_dtype=cache_dtype, tolerance=1e9)
    family, dtype = family_of(model.config), getattr(torch, slim.config.slim_layers[1]["cache_dtype"])
    prefix = family.attentions(model.config)[1]
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
    measured = CacheErrors(weights, AttentionInputs(inputs, rotation=rotation)).value_coordinates(
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


MAKERS = (
    {name: lambda vocab_size, name=name: family_model(name, vocab_size=vocab_size) for name in FAMILIES}
    | {name: lambda vocab_size, name=name: encoder_decoder(name, vocab_size=vocab_size) for name in MODELS}
    | {name: lambda vocab_size, name=name: multimodal_model(name, {"vocab_size": vocab_size}) for name in MULTIMODAL}
)
"""Makers of a model with a vocabulary of this size, by name."""

IN_ALL_DTYPES = ("llama", "gpt2", "t5", "t5-wide", "t5-narrow", "whisper", "llava")
"""One of each way to store: keys, inputs or the encoder's output; products that T5 keeps in fp32; part of a model."""

FIRST = [*((name, torch.bfloat16) for name in IN_ALL_DTYPES), ("llama", torch.float32), ("t5", torch.float16)]
MORE = [*zip(IN_ALL_DTYPES, (torch.float16, torch.float32) * 4, strict=False)]
MORE += [(name, torch.bfloat16) for name in MAKERS if "-" not in name]  # test_families converts variants, in fp32
CONVERSIONS = exhaustive_but(FIRST, dict.fromkeys([*FIRST, *MORE]))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("name", "dtype"), CONVERSIONS, ids=str)
def test_a_checkpoint_gets_the_plan_and_tensors_of_the_loaded_model(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Inputs are cached in the dtype that the model has them in, without an error."""
    source, target = tmp_path / "source", tmp_path / "slim"
    saved(MAKERS[name](VOCABULARY).to(dtype), source)
    report = convert_checkpoint(Settings(str(source), target))

    of_inputs = [
        one["output_error"]
        for layer in report["layers"]
        for one in layer["measured"]["candidates"]
        if one["plan"] in ("x", "e")
    ]
    assert all(error == 0 for error in of_inputs)
    auto = family_of(AutoConfig.from_pretrained(source)).auto
    model, slim = (auto.from_pretrained(folder, dtype=dtype) for folder in (source, target))
    config = language_config(model.config)
    ids = calibration_ids(AutoTokenizer.from_pretrained(source), limit=longest_text(config))
    in_memory = to_slim(model, ids)
    assert language_config(slim.config).slim_layers == language_config(in_memory.config).slim_layers
    expected, found = in_memory.state_dict(), slim.state_dict()
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_exact_caches_are_called_so_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A logarithmic axis has no place for an error of 0."""
    source, target = tmp_path / "source", tmp_path / "slim"
    saved(family_model("gpt2", vocab_size=VOCABULARY).bfloat16(), source)
    matplotlib.use("Agg")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    report = convert_checkpoint(Settings(str(source), target))
    assert [layer["output_error"] for layer in report["layers"]] == [0, 0]
    errors = pyplot.gcf().axes[1]
    chosen = next(line for line in errors.lines if line.get_label() == "chosen")
    assert all(error > errors.get_ylim()[0] for error in chosen.get_ydata())
    assert [text.get_text() for text in errors.texts] == ["x, exact"] * 2
    monkeypatch.undo()
    pyplot.close("all")
    rows = [line.split() for line in run("convert-checkpoint", source, "--dry-run").stdout.splitlines()]
    assert [row[-6:-2:2] for row in rows if "inputs" in row] == [["exact", "exact"]] * 2


STEPS = 64


@lru_cache
def prompt() -> Tensor:
    """A few-shot prompt of tasks that the calibration text does not have."""
    tasks = embedded_tasks()
    _, tokenizer = load_embedded()
    return tokenizer(few_shot_prompt(tasks[30], tasks[24:29]), return_tensors="pt").input_ids[:, :600]


def logits(model: PreTrainedModel) -> Tensor:
    """Logits of the prompt, whose last tokens are fed one by one."""
    cache = DynamicCache(config=model.config)
    ids = prompt()
    parts = ids.split([ids.shape[1] - STEPS, *[1] * STEPS], 1)
    with torch.no_grad():
        return torch.cat([model(part, **{CACHE: cache}).logits for part in parts], 1)[0]


@needs_weights
def test_in_bf16_the_plan_is_as_accurate_as_keys_and_values_and_keys_alone_are_not() -> None:
    model, tokenizer = load_embedded(torch.bfloat16)
    oracle = logits(load_embedded(torch.bfloat16)[0].double())
    stock = relative(logits(model), oracle)
    planned = to_slim(model, tokenizer=tokenizer)
    assert relative(logits(planned), oracle) < 2 * stock
    assert relative(logits(to_slim(model, tokenizer=tokenizer, plan="k")), oracle) > 2 * stock
    cache = planned.generate(prompt(), max_new_tokens=1, return_dict_in_generate=True)[CACHE]
    sizes = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    assert (
        sum(sizes) <= 0.6 * 4 * prompt().shape[1] * 2 * 256 * 2
    )  # of keys and values: layers, tokens, both, d, bytes


@pytest.mark.parametrize(("cache_dtype", "share"), exhaustive_but([("auto", 1.0)], [("auto", 1.0), ("int8", 0.99)]))
@needs_weights
def test_in_fp32_greedy_tokens_are_the_same(cache_dtype: str, share: float) -> None:
    """With int8 they were too, when it was measured: 192 of 192."""
    model, tokenizer = load_embedded()
    slim = to_slim(model, tokenizer=tokenizer, cache_dtype=cache_dtype)
    assert all(layer.get("cache_dtype", "auto") == cache_dtype for layer in slim.config.slim_layers)
    tokenizer.padding_side = "left"
    tasks = embedded_tasks()
    texts = [few_shot_prompt(tasks[at], tasks[at + 1 : at + 1 + shots]) for at, shots in ((3, 1), (40, 3), (60, 0))]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    found, expected = (one.generate(**inputs, **options)[:, -64:] for one in (slim, model))
    assert (found == expected).double().mean() >= share
