"""What each layer of a model stores: layouts of configs and of models, beside what transformers' own caches hold."""

from collections import OrderedDict

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.layout import ModelLayout
from hf_fastdecode.cache.stores import PER_TOKEN, Kind, Store
from hf_fastdecode.errors import Unsupported

from ..tiny_models import ARCHITECTURES, VOCABULARY, tiny_model

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 4}
FULL = Store(Kind.FULL, 4, 4, 16, 16)


def layout(model_type: str, **fields: object) -> ModelLayout:
    return ModelLayout.from_config(AutoConfig.for_model(model_type, **{**SIZES, **fields}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stores_are_what_caches_hold(name):
    """Heads and widths of every layer, and of layers with a window its tokens."""
    model = tiny_model(name)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.randint(3, VOCABULARY, (1, 60)), **{CACHE: cache}, use_cache=True)
    found = ModelLayout.of(model)
    assert len(found.layers) == len(cache.layers)
    for (store,), layer in zip(found.layers, cache.layers, strict=True):
        tokens = 60 if store.window is None else min(60, store.window - 1)
        assert layer.keys.shape[1:] == (store.kv_heads, tokens, store.head_dim)
        assert layer.values.shape[1:] == (store.kv_heads, tokens, store.value_dim)
    heads = model.config.num_attention_heads if name != "laguna" else None
    assert all(store.query_heads == (heads or store.query_heads) for _, store in found)


class Divided(OrderedDict):
    def __getitem__(self, name):
        raise AssertionError(f"all processes would gather {name}")


def test_no_parameter_is_read_as_an_attribute():
    """ZeRO-3 gathers it then, within passes, on this process alone."""
    model = tiny_model("qwen3")
    for module in model.modules():
        module._parameters = Divided(module._parameters)
    assert ModelLayout.of(model).layers == ModelLayout.from_config(model.config).layers


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_config_says_what_its_model_has(name):
    model = tiny_model(name)
    assert ModelLayout.from_config(model.config).layers == ModelLayout.of(model).layers


@pytest.mark.parametrize(
    ("model_type", "fields", "kinds"),
    [
        ("mistral", {"sliding_window": 32}, {0: [Kind.SLIDING], 3: [Kind.SLIDING]}),
        ("mistral", {"sliding_window": None}, {0: [Kind.FULL]}),
        ("deepseek_v3", {"num_key_value_heads": 4}, {0: [Kind.LATENT]}),
        ("qwen3_next", {}, {0: [Kind.STATE], 3: [Kind.FULL]}),
        ("falcon_h1", {"num_key_value_heads": 2}, {0: [Kind.STATE, Kind.FULL]}),
        ("mamba2", {"num_heads": 8, "head_dim": 16}, {0: [Kind.STATE]}),
        (
            "llama4_text",
            {"layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
            {0: [Kind.CHUNKED], 3: [Kind.FULL]},
        ),
        ("nemotron_h", {"layer_types": ["mlp", "full_attention", "moe", "linear_attention"]}, {0: [], 2: []}),
        ("bert-generation", {"is_decoder": True, "add_cross_attention": True}, {0: [Kind.FULL, Kind.CROSS]}),
        ("gemma3n_text", {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 4}, {2: [Kind.FULL], 3: []}),
    ],
)
def test_kinds(model_type, fields, kinds):
    found = layout(model_type, **fields)
    assert len(found.layers) == 4
    assert {index: [store.kind for store in found.layers[index]] for index in kinds} == kinds


def test_sizes_of_latents():
    (store,) = layout("deepseek_v3", kv_lora_rank=24, qk_rope_head_dim=8).layers[0]
    assert store == Store(Kind.LATENT, query_heads=4, kv_heads=1, head_dim=32, value_dim=24)
    assert store.numbers == 32


def test_a_chunk_is_a_window():
    types = ["chunked_attention", "full_attention", "chunked_attention", "full_attention"]
    found = layout("llama4_text", layer_types=types, attention_chunk_size=64)
    assert [store.window for _, store in found] == [64, None, 64, None]
    assert found.smallest_window == 64


def test_layers_of_their_own_per_config():
    """transformers' fields that differ from layer to layer."""
    config = AutoConfig.for_model("llama", **SIZES, num_key_value_heads=4)
    config.per_layer_config = {1: {"num_key_value_heads": 2, "head_dim": 32}, 2: {"skip": ["attention"]}}
    found = ModelLayout.from_config(config)
    assert found.layers == ((FULL,), (Store(Kind.FULL, 4, 2, 32, 32),), (), (FULL,))
    assert found.distinct == {FULL: 2, found.layers[1][0]: 1}
    assert list(found.per_token) == [0, 1, 3]


def test_a_config_without_layers_has_no_layout_of_any():
    config = AutoConfig.for_model("llama", **SIZES)
    vars(config)["num_hidden_layers"] = None
    assert ModelLayout.from_config(config).layers == ()


def test_what_a_config_does_not_say_is_0():
    config = AutoConfig.for_model("llama", **SIZES)
    vars(config).update(hidden_size=None, head_dim=None)
    assert [(store.kv_heads, store.head_dim, store.numbers) for _, store in ModelLayout.from_config(config)] == (
        [(4, 0, 0)] * 4
    )


def test_a_config_without_heads_keeps_states():
    found = layout("rwkv", num_attention_heads=None)
    assert found.layers == ((Store(Kind.STATE, states=1),),) * 4


def test_heads_are_those_on_this_device():
    """Of tensor parallelism, which leaves each rank a part of the rows of a projection."""
    model = tiny_model("llama-mha")
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(layer.self_attn, name).weight
            weight._local_tensor = weight[:32]
    assert {store for _, store in ModelLayout.of(model)} == {Store(Kind.FULL, 2, 2, 16, 16)}


@pytest.mark.parametrize(("name", "outputs"), [("llama-mha", 8), ("llama-mha", 0), ("gpt-neox", 80)])
def test_a_part_that_is_no_whole_number_of_heads_is_refused(name, outputs):
    model = tiny_model("llama-mha")
    attention = model.model.layers[0].self_attn
    if name == "gpt-neox":
        attention.query_key_value = torch.nn.Linear(64, 192)
    projection = attention.query_key_value if name == "gpt-neox" else attention.k_proj
    projection.weight._local_tensor = projection.weight[:outputs]
    with pytest.raises(Unsupported, match=f"this process has {outputs} of the {len(projection.weight)} outputs of"):
        ModelLayout.of(model)


@pytest.mark.parametrize("model_type", sorted(AutoModelForCausalLM._model_mapping._model_mapping))
def test_every_config_has_a_layout(model_type):
    """The default config of every architecture, whether it can share or not."""
    try:
        config = AutoConfig.for_model(model_type)
    except Exception:
        pytest.skip(f"{model_type} has no default config")
    found = ModelLayout.from_config(config)
    assert len(found.types) == len(found.layers)
    assert all(store.numbers for _, store in found if store.kind in PER_TOKEN), found.layers[:2]
