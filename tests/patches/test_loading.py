"""Slim checkpoints on disk: saved, loaded, and refused where the package was not imported."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_fastdecode.patches.architectures.slim_llama import SlimLlamaForCausalLM, SlimLlamaModel
from hf_fastdecode.patches.slim_configs import SlimLlamaConfig

from ..test_layout import ROOT
from ..tiny_models import tiny_model
from .slim_models import TEXT, pair

LOAD = """
import sys
from transformers import AutoModelForCausalLM
model, found = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
print(type(model).__name__, *found["missing_keys"], *found["unexpected_keys"])
print(*(finder for finder in sys.meta_path if "hf_fastdecode" in repr(finder)))
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", params=["k", "k+r", "mixed"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("slim")
    pair(request.param)[1].save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return request.param, folder


def test_saved_and_loaded(saved: tuple[str, Path], tmp_path: Path) -> None:
    plan, folder = saved
    slim = pair(plan)[1]
    loaded, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not (found["missing_keys"] or found["unexpected_keys"] or found["mismatched_keys"])
    assert type(loaded) is SlimLlamaForCausalLM
    assert loaded.config.slim_layers == slim.config.slim_layers
    with torch.no_grad():
        assert torch.equal(loaded(TEXT[None]).logits, slim(TEXT[None]).logits)
    loaded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in slim.state_dict().items())
    assert type(AutoModel.from_pretrained(folder)) is SlimLlamaModel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loading_in_a_dtype_leaves_the_matrices(saved: tuple[str, Path], dtype: torch.dtype) -> None:
    plan, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert loaded.dtype == dtype
    expected = deepcopy(pair(plan)[1]).to(dtype).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])


def test_device_map(saved: tuple[str, Path]) -> None:
    plan, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    with torch.no_grad():
        assert torch.equal(loaded(TEXT[None]).logits, pair(plan)[1](TEXT[None]).logits)


@pytest.mark.parametrize(
    "first",
    [
        "hf_fastdecode",
        "hf_fastdecode.patches.slim_configs",  # as when a pickled config is read
        "transformers",
        "transformers.models.llama.modeling_llama",
    ],
)
def test_a_fresh_process_that_imports_the_package(tmp_path: Path, first: str) -> None:
    pair("k+r")[1].save_pretrained(tmp_path)
    done = python(f"import {first}, hf_fastdecode, transformers\n{LOAD}", str(tmp_path))
    assert done.stdout.split() == ["SlimLlamaForCausalLM"], done.stderr


def test_a_fresh_process_that_does_not_import_it_refuses(tmp_path: Path) -> None:
    pair("k+r")[1].save_pretrained(tmp_path)
    done = python(LOAD, str(tmp_path))
    assert done.returncode != 0
    assert "slim_llama" in done.stderr
    assert not done.stdout


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    done = python("import hf_fastdecode; print(*({'torch', 'transformers'} & set(sys.modules)))")
    assert done.stdout.split() == [], done.stderr


def test_plain_models_are_unaffected() -> None:
    model = tiny_model("llama-mha")
    assert type(model) is LlamaForCausalLM
    assert type(AutoConfig.for_model("llama")) is LlamaConfig
    assert type(AutoModelForCausalLM.from_config(LlamaConfig(**model.config.to_dict()))) is LlamaForCausalLM
    assert all(hasattr(layer.self_attn, "v_proj") for layer in model.model.layers)


def test_configs() -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    config = SlimLlamaConfig(**sizes, slim_layers=[{"plan": "k"}, {"plan": "k+r", "rank": 3}])
    assert [layer.rank for layer in config.layer_plans] == [0, 3]
    assert [layer.cache_dtype for layer in config.layer_plans] == [None, None]  # as in configs that had no such field
    eight = SlimLlamaConfig(**sizes, slim_layers=[{"plan": "k", "cache_dtype": "int8"}, {"plan": "kv"}])
    assert [layer.cache_dtype for layer in eight.layer_plans] == ["int8", None]
    assert {layer.plan for layer in SlimLlamaConfig(**sizes).layer_plans} == {"kv"}
    for fields, message in (
        ({"slim_layers": [{"plan": "k"}]}, "a plan for each of 2 layers, got 1"),
        ({"slim_layers": [{"plan": "v"}] * 2}, "must be one of k, k\\+r, kv, got 'v'"),
        ({"slim_layers": [{"plan": "k", "rank": 2}] * 2}, "rank of plan 'k' must be 0, got 2"),
        ({"slim_layers": [{"plan": "k", "ranks": 2}] * 2}, "unknown field 'ranks'"),
        ({"slim_layers": [{"plan": "k", "cache_dtype": "int4"}] * 2}, "one of float16, bfloat16, .* got 'int4'"),
        ({"slim_layers": [{"plan": "kv", "cache_dtype": "int8"}] * 2}, "None, the model's own, got 'int8'"),
        ({"slim_layers": [{"plan": "k"}] * 2, "num_key_value_heads": 2}, "got 2 != 4"),
        ({"slim_matrix_dtype": "bfloat16"}, "float16 or float32"),
    ):
        with pytest.raises(ValueError, match=message):
            SlimLlamaConfig(**sizes, **fields)


def test_layers_offloaded_to_the_disk(saved: tuple[str, Path], tmp_path: Path) -> None:
    """Weights that come to the device for their own module's forward pass only."""
    plan, folder = saved
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map = {**places, "model.layers.0": "cpu", "model.layers.1": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path)
    assert loaded.model.layers[1].self_attn.k_proj.weight.is_meta
    with torch.no_grad():
        assert torch.equal(loaded(TEXT[None]).logits, pair(plan)[1](TEXT[None]).logits)
