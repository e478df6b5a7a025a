"""Slim models of every architecture against the models they were made of, in memory and on disk."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload
from packaging.version import Version
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Phi3ForCausalLM,
    PreTrainedModel,
    StaticCache,
)

from hf_fastdecode._compat import CACHE
from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.conversion.calibration import RoundedCache, calibration_ids
from hf_fastdecode.conversion.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.families import FAMILIES as SUPPORTED
from hf_fastdecode.conversion.families import family_of
from hf_fastdecode.conversion.fit.cached_numbers import stored_bytes
from hf_fastdecode.conversion.layer_converter import PlanChoice
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.patches.layers.family import attention_inputs, longest_text

from ..cases import exhaustive_but
from ..conversion.checkpoints import VOCABULARY, loaded, saved
from ..conversion.fit.references import attention_output
from ..test_layout import ROOT
from ..tiny_models import ragged_prompts
from .family_models import FAMILIES, REFUSED, WITH_INPUTS, family_condition, family_model, family_pair, pairs
from .slim_models import TEXT, relative

PROMPTS = ragged_prompts(33, 57)
EPS = torch.finfo(torch.float32).eps
STORED_AS_OTHERS = ("phi3-window", "phi3-partial", "phi3-long", "gpt_neox-serial", "gpt2-scaled", "qwen2")
STORED_AS_OTHERS += ("cohere-norm", "stablelm-norm", "codegen", "llama", "llama-yarn")
"""Architectures and variants whose checkpoints have nearly the tensors of another here."""

PAIRS = pairs("k", "k+r", "x")
ON_DISK = exhaustive_but(FAMILIES.keys() - STORED_AS_OTHERS, FAMILIES)

DROPS_TOKENS = Version(transformers.__version__) < Version("5.20")
"""Whether ordinary Phi-3 reads only the last token where it drops the cache; without a cache it reads all."""


def generate(model: PreTrainedModel, **options: Any) -> Any:
    # One row past the window of 40 tokens, one past the 64 from which frequencies are others.
    settings = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, **PROMPTS, **options}
    if DROPS_TOKENS and type(model) is Phi3ForCausalLM and model.config.rope_parameters["rope_type"] == "longrope":
        settings = {**settings, "cache_implementation": None, "use_cache": False}
    return model.generate(**settings, output_logits=True)


@pytest.mark.parametrize("name", ["stablelm-norm", "cohere-norm", "olmo2", "phi3"])
def test_weights_offloaded_to_the_cpu(name: str) -> None:
    """Weights come to the device for the forward pass of their own module only."""
    slim = deepcopy(family_pair(name, "k")[1])
    with torch.no_grad():
        expected = slim(TEXT[None]).logits
        assert torch.equal(cpu_offload(slim, torch.device("cpu"))(TEXT[None]).logits, expected)


@lru_cache
def greedy_of_stock(name: str) -> Any:
    """Greedy tokens of the ordinary model, which all plans of its slim forms are compared with."""
    return generate(family_model(name))


def test_every_family_is_tested_and_listed() -> None:
    assert {model_type for model_type, _ in FAMILIES.values()} == set(SUPPORTED)
    page = (ROOT / "docs" / "slim-architectures.md").read_text(encoding="utf-8")
    table = page.partition("| such as |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(SUPPORTED)


@pytest.mark.parametrize("model_type", SUPPORTED)
def test_configs_split_no_attention_over_devices(model_type: str) -> None:
    config = AutoConfig.for_model(f"slim_{model_type}")
    assert {layer.plan for layer in config.layer_plans} == {"kv"}
    split = set(config.base_model_tp_plan or {}) - {"embed_tokens"}  # tied embeddings, before transformers 5.21
    assert all(".mlp." in name for name in split)
    if config.to_dict().get("num_key_value_heads"):
        with pytest.raises(ValueError, match="num_key_value_heads == num_attention_heads, got 1 != "):
            AutoConfig.for_model(
                f"slim_{model_type}", num_key_value_heads=1, slim_layers=[{"plan": "k"}] * config.num_hidden_layers
            )


@pytest.mark.parametrize(("name", "plan"), exhaustive_but(PAIRS[::2], PAIRS))
def test_greedy_over_padded_rows(name: str, plan: str) -> None:
    """Rounding of fp32 grows by no more than the condition number of the keys, and tokens stay."""
    model, slim = family_pair(name, plan)
    assert slim.config.model_type == f"slim_{model.config.model_type}"
    expected = greedy_of_stock(name)
    found = generate(slim, **{CACHE: DynamicCache(config=slim.config)})
    assert torch.equal(found.sequences, expected.sequences)
    error = relative(torch.stack(found.logits), torch.stack(expected.logits))
    assert error < family_condition(slim) * EPS
    widths = [layer.keys.shape[-1] + layer.values.shape[-1] for layer in found[CACHE].layers]
    head_dim = getattr(slim.config, "head_dim", None)
    keys = slim.config.num_attention_heads * head_dim if head_dim else slim.config.hidden_size
    assert widths == ([keys + 4, keys + 9] if plan == "k+r" else [keys, keys])


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_read_as_the_layer_uses_them(name: str) -> None:
    """The reference makes of them, with their scale, norms, biases and RoPE, what the layer does."""
    model = family_model(name)
    family, ids, seen = family_of(model.config), TEXT[None, :40], []
    prefix = family.attentions(model.config)[1]

    def keep(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        seen.append((attention_inputs(args, kwargs), output[0][0]))

    with model.get_submodule(prefix.rstrip(".")).register_forward_hook(keep, with_kwargs=True), torch.no_grad():
        model(ids)
    own = {key.removeprefix(prefix): one for key, one in model.state_dict().items() if key.startswith(prefix)}
    plain = family.plain(model.config, own)
    joined = family.ordinary(model.config, plain)
    assert joined.keys() == own.keys()
    assert all(torch.equal(joined[key], own[key]) for key in own)
    weights = family.weights(model.config, plain, 1)
    expected = attention_output(weights, seen[0][0], rotation=family.rotation(model.config, 40))
    assert relative(seen[0][1], expected) < 20 * EPS


@pytest.mark.parametrize(("name", "plan"), exhaustive_but(pairs("k+r", "x")[::2], pairs("k+r", "x")))
def test_static_cache(name: str, plan: str) -> None:
    expected, found = (generate(model, cache_implementation="static") for model in family_pair(name, plan))
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize("cache", [{}, {"prefill_chunk_size": 9}, {"cache_implementation": "static"}], ids=str)
def test_prompts_longer_than_the_window(cache: dict[str, Any]) -> None:
    options = {**ragged_prompts(30, 70), **cache}
    expected, found = (generate(model, **options) for model in family_pair("phi3-window", "k"))
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=str)
def test_frequencies_that_change_with_length(cache: dict[str, Any]) -> None:
    """Rows that reach 64 tokens have their caches made anew by the model, with other frequencies."""
    model, slim = family_pair("phi3-long", "k")
    options = {**ragged_prompts(40, 57), **cache}
    expected, found = generate(model, **options), generate(slim, **options)
    assert torch.equal(found.sequences, expected.sequences)
    error = relative(torch.stack(found.logits), torch.stack(expected.logits))
    assert error < family_condition(slim) * EPS
    frequencies = model.model.rotary_emb
    assert not torch.equal(frequencies.inv_freq, frequencies.original_inv_freq)


@pytest.mark.parametrize("name", ["phi3", "phi3-long", "gpt2"])
def test_static_cache_without_masks_and_positions(name: str) -> None:
    """Fewer queries than a head has coordinates, and more slots than the frequencies of short texts serve."""
    found = []
    for model in family_pair(name, "k"):
        cache = StaticCache(config=model.config, max_cache_len=100)
        with torch.no_grad():
            found.append(torch.cat([model(part[None], **{CACHE: cache}).logits for part in TEXT[:20].split(10)], 1))
    assert relative(found[1], found[0]) < family_condition(family_pair(name, "k")[1]) * EPS


def logits(model: PreTrainedModel) -> Tensor:
    """Logits of a text in parts, which read the ones before them from the cache."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        return torch.cat([model(part[None], **{CACHE: cache}).logits for part in TEXT[:64].split((48, 1, 9, 6))], 1)


@pytest.mark.parametrize(("name", "plan"), pairs("mixed", "x"))
def test_parts_without_position_ids(name: str, plan: str) -> None:
    model, slim = family_pair(name, plan)
    assert relative(logits(slim), logits(model)) < family_condition(slim) * EPS


@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_is_as_accurate_as_the_ordinary_model(name: str) -> None:
    """Against the same weights in fp64, with twice the ordinary model's error as the budget, as plans have it."""
    model = family_model(name).bfloat16()
    slim = to_slim(model, TEXT)
    plans = {layer["plan"] for layer in slim.config.slim_layers}
    assert plans == {"x"} if name in WITH_INPUTS else "kv" not in plans
    oracle = logits(deepcopy(model).double())
    assert relative(logits(slim), oracle) < 2 * relative(logits(model), oracle)


@pytest.mark.parametrize(("name", "plan"), pairs("k+r", "x"))
def test_gradients(name: str, plan: str) -> None:
    """Gradients of all layers reach the embeddings; training, with its dropouts, changes them."""
    found = []
    for training, of in ((False, 0), (False, 1), (True, 1)):
        model = deepcopy(family_pair(name, plan)[of]).train(training)
        model(TEXT[None, :40], labels=TEXT[None, :40]).loss.backward()
        found.append(model.get_input_embeddings().weight.grad)
    assert relative(found[1], found[0]) < family_condition(family_pair(name, plan)[1]) * EPS * 10
    drops = any(
        "drop" in key and share for key, share in model.config.to_dict().items() if key != "classifier_dropout"
    )
    assert (relative(found[2], found[1]) > 0.01) == drops


@pytest.mark.parametrize(("name", "plan"), pairs("k+r", "x"))
def test_attention_weights(name: str, plan: str) -> None:
    weights = []
    for model in family_pair(name, plan):
        eager = deepcopy(model)
        eager.set_attn_implementation("eager")
        with torch.no_grad():
            weights.append(eager(TEXT[None, :20], output_attentions=True).attentions)
    assert len(weights[1]) == 2
    for expected, found in zip(*weights):
        assert relative(found, expected) < family_condition(family_pair(name, plan)[1]) * EPS


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", ON_DISK)
def test_checkpoint_there_and_back(name: str, tmp_path: Path) -> None:
    """A slim checkpoint generates the same; an ordinary one made of it has the same tensors, W_V up to rounding."""
    model = family_model(name, vocab_size=VOCABULARY)
    source, slim_folder, full_folder = (tmp_path / one for one in ("source", "slim", "full"))
    saved(model, source, max_shard_size="100KB")
    choice = PlanChoice((("kv", 0), ("k+r", 5)))
    convert_checkpoint(Settings(str(source), slim_folder, choice=choice, shard_bytes=50_000, verify=True))
    slim = loaded(slim_folder)
    assert type(AutoModel.from_pretrained(slim_folder)) is type(slim.base_model)
    assert torch.equal(generate(slim).sequences, generate(model).sequences)

    tokenizer = AutoTokenizer.from_pretrained(source)  # whose class goes by the model type
    ids = calibration_ids(tokenizer, limit=longest_text(model.config))
    in_memory = to_slim(model, ids, plan=choice.plan).state_dict()
    for key, one in slim.state_dict().items():  # offsets are means of what layers saw on the text
        assert (
            relative(one, in_memory[key]) < 1e-4 if key.endswith("key_offset") else one.shape == in_memory[key].shape
        )

    report = convert_checkpoint(Settings(str(slim_folder), full_folder, format="full"))
    full = AutoModelForCausalLM.from_pretrained(full_folder)
    assert type(full) is type(model)
    expected, found = model.state_dict(), full.state_dict()
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in expected.items()}
    changed = {name for name in expected if not torch.equal(found[name], expected[name])}
    assert len({name.rpartition(".")[0] for name in changed}) == 1  # the projection that makes values in layer 1
    assert all(".1." in name for name in changed)
    assert report["layers"][1]["recovered_error"] < 20 * EPS
    for one in changed:
        assert relative(found[one], expected[one]) < 20 * EPS


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", WITH_INPUTS)
def test_checkpoint_of_inputs_there_and_back(name: str, tmp_path: Path) -> None:
    """All weights stay; 8 bits too, which the config tells."""
    model = family_model(name, vocab_size=VOCABULARY)
    source, slim_folder, full_folder = (tmp_path / one for one in ("source", "slim", "full"))
    saved(model, source)
    choice = PlanChoice("x", cache_dtype="int8")
    convert_checkpoint(Settings(str(source), slim_folder, choice=choice, verify=True))
    slim = loaded(slim_folder)
    assert [(layer.plan, layer.cache_dtype) for layer in slim.config.layer_plans] == [("x", "int8")] * 2
    report = convert_checkpoint(Settings(str(slim_folder), full_folder, format="full"))
    assert [layer["recovered_error"] for layer in report["layers"]] == [0, 0]
    expected, found = (one.state_dict() for one in (model, AutoModelForCausalLM.from_pretrained(full_folder)))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", WITH_INPUTS)
def test_inputs_in_8_bits(name: str) -> None:
    """In half the bytes of keys and values in int8, and at most twice their error."""
    model = family_model(name)
    slim = to_slim(model, TEXT, plan="x", cache_dtype="int8")
    caches = [DynamicCache(), RoundedCache(model.config, torch.int8)]
    with torch.no_grad():
        oracle = model(TEXT[None]).logits
        found, int8 = (one(TEXT[None], **{CACHE: cache}).logits for one, cache in zip((slim, model), caches))
    assert relative(found, oracle) < 2 * relative(int8, oracle)
    widths = {(layer.keys.dtype, layer.keys.shape[-1], layer.values.shape[-1]) for layer in caches[0].layers}
    assert widths == {(torch.uint8, stored_bytes(64, torch.int8, 16), 0)}
    assert torch.equal(generate(slim).sequences, generate(slim, use_cache=False).sequences)


def test_plans_of_other_architectures() -> None:
    for name, plan in (("olmo", "x"), ("gpt2", "e")):
        with pytest.raises(ValueError, match=f"layer 0 cannot have plan '{plan}', only one of k"):
            to_slim(family_model(name), TEXT, plan=plan)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"plan": ("k", 0)}, r'a pair such as \("k\+r", 64\) for each layer, got'),
        ({"plan": None}, "for each layer, got None"),
        ({"plan": (("k+r", 0), ("k", 0))}, r"rank of plan 'k\+r' must be an integer of at least 1, got 0"),
        ({"plan": (("k+r", 4.0), ("k", 0))}, "an integer of at least 1, got 4.0"),
        ({"plan": (("k+r", True), ("k", 0))}, "an integer of at least 1, got True"),
        ({"plan": (("k", 4), ("k", 0))}, "rank of plan 'k' must be 0, got 4"),
        ({"plan": (("q", 1), ("k", 0))}, "must be one of k, .*, got 'q'"),
        ({"rank": "4"}, "`rank` must be an integer of at least 0 .*, got '4'"),
        ({"rank": 4.0}, "`rank` must be an integer of at least 0 .*, got 4.0"),
        ({"tolerance": "2"}, "`tolerance` must be a number of at least 1 .*, got '2'"),
        ({"tolerance": float("inf")}, "`tolerance` must be a number of at least 1 .*, got inf"),
    ],
    ids=str,
)
def test_choices_that_are_none(option: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PlanChoice(**option)


def test_plans_in_lists() -> None:
    assert PlanChoice([["k+r", 4], ("k", 0)]).plan == (("k+r", 4), ("k", 0))
    with pytest.raises(ValueError, match=r"must be a tensor of ids of one text, .*, got list"):
        to_slim(family_model("gpt2"), TEXT.tolist())


OLD = {
    "gpt_neox": ("lm_head.", "embed_out.", "gpt_neox.layers.0.attention.masked_bias"),
    "gpt2": ("transformer.", "", "h.0.attn.bias"),
    "opt": ("model.", "", None),
    "codegen": ("", "", "transformer.h.0.attn.causal_mask"),
}
"""Name -> beginning of names in models, in older checkpoints, and a tensor that models no longer read."""


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", OLD)
def test_older_checkpoints(name: str, tmp_path: Path) -> None:
    """Names of older releases, and masks that were stored then."""
    new, old, mask = OLD[name]
    model = family_model(name, vocab_size=VOCABULARY)
    AutoTokenizer.from_pretrained(MODEL_PATH).save_pretrained(tmp_path / "source")
    model.config.save_pretrained(tmp_path / "source")
    state = {key.replace(new, old, 1) if key.startswith(new) else key: one for key, one in model.state_dict().items()}
    state |= {} if mask is None else {mask: torch.ones(1)}
    assert set(state) != set(model.state_dict())
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    convert_checkpoint(Settings(str(tmp_path / "source"), tmp_path / "slim", choice=PlanChoice(rank=5)))
    slim = loaded(tmp_path / "slim")
    assert torch.equal(generate(slim).sequences, generate(model).sequences)


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_a_slim_form(name: str) -> None:
    family, overrides, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        to_slim(family_model(family, **overrides), TEXT)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox", "phi3-window", "qwen2"])
def test_a_calibration_longer_than_the_model_takes_is_cut(name: str) -> None:
    model = family_model(name)
    ids = TEXT[torch.arange(1500) % len(TEXT)]
    limit = min(1024, longest_text(model.config))
    found, expected = to_slim(model, ids, rank=3), to_slim(model, ids[:limit], rank=3)
    assert all(torch.equal(one, expected.state_dict()[key]) for key, one in found.state_dict().items())
