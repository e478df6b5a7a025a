"""Slim checkpoints on disk: saved, loaded, and refused where the package was not imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
)

from hf_fastdecode.patches import registration
from hf_fastdecode.patches.architectures.slim_llama import SlimLlamaForCausalLM, SlimLlamaModel
from hf_fastdecode.patches.slim_configs import SlimLlamaConfig

from ..cases import exhaustive_but
from ..fresh_processes import run_fresh
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


ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_fastdecode":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""

TRUST = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
folder, again = sys.argv[1:]
trusted = {"trust_remote_code": True}
model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **trusted)
print(*found["missing_keys"], *found["unexpected_keys"])
model.save_pretrained(again)
for auto, place in ((AutoConfig, folder), (AutoModel, folder), (AutoModelForCausalLM, again)):
    kind = type(auto.from_pretrained(place, **trusted))
    print(kind.__module__, kind.__name__)
"""


def python(code: str, *arguments: str, modules: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process, with a folder for the code that transformers copies."""
    return run_fresh(code, *arguments, **({} if modules is None else {"HF_MODULES_CACHE": str(modules)}))


@pytest.fixture(scope="module", params=["k", "k+r", "mixed"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("slim")
    pair(request.param)[1].save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return request.param, folder


def code_of_checkpoints() -> set[str]:
    return {name for name in sys.modules if name.startswith("transformers_modules")}


def test_saved_and_loaded(saved: tuple[str, Path], tmp_path: Path) -> None:
    plan, folder = saved
    before = code_of_checkpoints()
    slim = pair(plan)[1]
    loaded, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not (found["missing_keys"] or found["unexpected_keys"] or found["mismatched_keys"])
    assert type(loaded) is SlimLlamaForCausalLM
    assert loaded.config.slim_layers == slim.config.slim_layers
    with torch.no_grad():
        assert torch.equal(loaded(TEXT[None]).logits, slim(TEXT[None]).logits)
    loaded.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in slim.state_dict().items())
    assert type(AutoModel.from_pretrained(folder)) is SlimLlamaModel
    assert code_of_checkpoints() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loading_in_a_dtype_leaves_the_matrices(saved: tuple[str, Path], dtype: torch.dtype) -> None:
    plan, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert loaded.dtype == dtype
    expected = deepcopy(pair(plan)[1]).to(dtype).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])


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
    pair("k+r")[1].save_pretrained(tmp_path / "slim")
    modules = tmp_path / "modules"
    done = python(f"import {first}, hf_fastdecode, transformers\n{LOAD}", str(tmp_path / "slim"), modules=modules)
    assert done.stdout.split() == ["SlimLlamaForCausalLM"], done.stderr
    assert not modules.exists()  # the registered classes serve, not the checkpoint's code
    assert "arning" not in done.stderr


def test_a_fresh_process_that_does_not_import_it_refuses(tmp_path: Path) -> None:
    pair("k+r")[1].save_pretrained(tmp_path)
    done = python(LOAD, str(tmp_path))
    assert done.returncode != 0
    assert "trust_remote_code=True" in done.stderr.splitlines()[-1]
    assert "ValueError" in done.stderr
    assert "SlimLlama" not in done.stdout


def test_a_fresh_process_that_trusts_the_checkpoint(tmp_path: Path) -> None:
    """It loads the package's own classes, which save what can be loaded so again."""
    slim, again = tmp_path / "slim", tmp_path / "again"
    pair("k+r")[1].save_pretrained(slim)
    done = python(TRUST, str(slim), str(again), modules=tmp_path / "modules")
    place = "hf_fastdecode.patches"
    assert done.stdout.splitlines() == [
        "",
        f"{place}.slim_configs SlimLlamaConfig",
        f"{place}.architectures.slim_llama SlimLlamaModel",
        f"{place}.architectures.slim_llama SlimLlamaForCausalLM",
    ], done.stderr
    assert "arning" not in done.stderr
    for file in ("modeling_slim.py", "config.json"):
        assert (again / file).read_text() == (slim / file).read_text()
    (copied,) = (tmp_path / "modules" / "transformers_modules").rglob("modeling_slim.py")
    assert not list(copied.parent.glob("slim_configs.py"))


def test_a_fresh_process_without_the_package(tmp_path: Path) -> None:
    pair("k+r")[1].save_pretrained(tmp_path / "slim")
    done = python(ABSENT + TRUST, str(tmp_path / "slim"), str(tmp_path / "again"), modules=tmp_path / "modules")
    assert done.returncode != 0
    assert "`pip install hf_fastdecode`" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", [name for name in CONFIG_MAPPING if name.startswith("slim_")])
def test_the_modelling_file_names_the_registered_classes(tmp_path: Path, name: str) -> None:
    config = AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    modules = {f"hf_fastdecode.patches.{one}" for one in ("slim_configs", "encoder_decoder_configs")}
    modules.add(f"hf_fastdecode.patches.architectures.{name}")
    code = (tmp_path / "modeling_slim.py").read_text()
    assert set(re.findall(r"^from (\S+) import", code, re.MULTILINE)) <= modules  # checkpoints in the world have these
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    names = run_path(str(tmp_path / "modeling_slim.py"))
    autos = (AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq)
    with torch.device("meta"):
        made = {auto.__name__: type(auto.from_config(config)) for auto in autos if type(config) in auto._model_mapping}
    assert made
    found = {auto: names[place.removeprefix("modeling_slim.")] for auto, place in auto_map.items()}
    assert found == {"AutoConfig": type(config), **made}


IMPORTABLE = [*(f"{name}Config" for name in ("Llama", "GPT2", "T5", "Whisper", "Mistral", "Llava")), "GPT2LMHeadModel"]

IMPORTED_FIRST = """
import importlib, sys
import hf_fastdecode
import transformers

getattr(transformers, sys.argv[1])
from hf_fastdecode.patches import encoder_decoder_configs, slim_configs
from hf_fastdecode.patches.config_base import families_in

for family in (*families_in(slim_configs), *families_in(encoder_decoder_configs)):
    ordinary, slim = (type(transformers.AutoConfig.for_model(name)) for name in (family, f"slim_{family}"))
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    assert issubclass(slim, ordinary) and ordinary is getattr(transformers, ordinary.__name__), family
    assert module.__spec__.loader is module.__loader__ and getattr(module, ordinary.__name__) is ordinary, family
assert not [finder for finder in sys.meta_path if "Watch" in type(finder).__name__]
"""


@pytest.mark.parametrize("name", exhaustive_but(["LlamaConfig", "GPT2LMHeadModel"], IMPORTABLE))
def test_whatever_is_imported_first(name: str) -> None:
    """An ordinary config imports the registry in the middle of its own import, which registration needs whole."""
    done = run_fresh(IMPORTED_FIRST, name)
    assert done.returncode == 0, done.stderr


PICKLED = """
import sys
import torch
import hf_fastdecode
from transformers import AutoModelForCausalLM

model = torch.load(sys.argv[1], weights_only=False)
assert type(AutoModelForCausalLM.from_config(model.config)) is type(model)
model.save_pretrained(sys.argv[2])
assert sorted(model.config.auto_map) == ["AutoConfig", "AutoModel", "AutoModelForCausalLM"]


class Mine(type(model)):
    pass


AutoModelForCausalLM.register(type(model.config), Mine, exist_ok=True)
assert type(AutoModelForCausalLM.from_config(type(model.config)(**model.config.to_diff_dict()))) is Mine
"""


def test_a_pickled_model_brings_its_classes_and_a_registration_of_the_users_stays(tmp_path: Path) -> None:
    torch.save(pair("k")[1], tmp_path / "model.pt")
    done = run_fresh(PICKLED, str(tmp_path / "model.pt"), str(tmp_path / "again"))
    assert done.returncode == 0, done.stderr


def test_an_import_that_fails_is_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was interrupted, in a notebook that goes on."""
    (tmp_path / "odd_registry.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('there').read_text()"
    )
    registered: list[bool] = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registration, "_REGISTRY", "odd_registry")
    monkeypatch.setattr(registration, "_MODELS", "odd_models")
    monkeypatch.setattr(registration, "_register", lambda: registered.append(True))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    registration.register_when_imported()
    finder = sys.meta_path[0]
    with pytest.raises(FileNotFoundError):
        import_module("odd_registry")
    assert not registered
    (tmp_path / "there").touch()
    import_module("odd_registry")
    assert registered == [True]
    assert finder not in sys.meta_path
    assert finder.find_spec("odd_registry", None) is None  # asked by another thread meanwhile
    del sys.modules["odd_registry"]


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport hf_fastdecode\n"
    code += "print(*({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
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
        ({"slim_layers": [{"plan": "kv", "cache_dtype": "int8"}] * 2}, "None, the model's dtype, got 'int8'"),
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


SAVED = Path(__file__).parent / "saved"

LOAD_SAVED = """
import json, os, sys
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin  # most of what all of them import

auto = {"slim_t5": "AutoModelForSeq2SeqLM", "slim_bart": "AutoModelForSeq2SeqLM",
        "slim_whisper": "AutoModelForSpeechSeq2Seq"}
for folder in sys.argv[1:]:
    if os.fork():  # each without what the others have imported of this package
        os.wait()
        continue
    assert not [name for name in sys.modules if name.startswith("hf_fastdecode")]
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    kind = getattr(transformers, auto.get(config.model_type, "AutoModelForCausalLM"))
    model = kind.from_config(config, trust_remote_code=True)
    print(json.dumps([os.path.basename(folder), type(model).__name__, type(model).__module__]), flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("names", exhaustive_but(["llama t5 whisper"], ["llama t5 whisper", "*"]))
def test_checkpoints_load_without_the_import(names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [SAVED / f"slim_{name}" for name in names.split()] if names != "*" else sorted(SAVED.glob("slim_*"))
    assert len(folders) == (15 if names == "*" else 3)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    done = run_fresh(LOAD_SAVED, *map(str, folders))
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [name for name, _, _ in found] == [path.name for path in folders], done.stderr
    for name, kind, module in found:
        config = json.loads((SAVED / name / "config.json").read_text())
        assert (kind, module) == (config["architectures"][0], f"hf_fastdecode.patches.architectures.{name}")
