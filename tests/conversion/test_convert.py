"""Checkpoints converted shard by shard: what comes out, what an interruption leaves, and the way back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from hf_fastdecode import model_names
from hf_fastdecode.conversion import convert
from hf_fastdecode.conversion import source as source_module
from hf_fastdecode.conversion.calibration import calibration_ids
from hf_fastdecode.conversion.convert import Settings, VerificationError, convert_checkpoint
from hf_fastdecode.conversion.layer_converter import PlanChoice
from hf_fastdecode.conversion.shards import ShardWriter
from hf_fastdecode.conversion.source import find_checkpoint
from hf_fastdecode.conversion.streams import SlimStream
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.errors import InputError

from .checkpoints import LAYERS, contents, loaded, save_multi_head

SHARD = 20_000  # bytes: less than a layer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_multi_head(tmp_path_factory.mktemp("source"))
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def settings(source: Path, target: Path | None, **options: Any) -> Settings:
    return Settings(str(source), target, **{"shard_bytes": SHARD, **options})


@pytest.fixture(scope="module")
def slim(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("slim") / "made"
    convert_checkpoint(settings(source, target, choice=PlanChoice(rank=3)))
    return target


def changed(folder: Path, change: Callable[[PreTrainedModel], object], *dtype: torch.dtype) -> Path:
    """A checkpoint whose weights a function has changed in place."""
    model = loaded(save_multi_head(folder, *dtype))
    with torch.no_grad():
        change(model)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def completions(model: PreTrainedModel, folder: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    inputs = tokenizer(["def f(x):", "assert length('red') == 3"], return_tensors="pt", padding=True)
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}
    return tokenizer.batch_decode(model.generate(**inputs, **options))


def test_converted_checkpoint_generates_the_same(source: Path, slim: Path) -> None:
    assert completions(loaded(slim), slim) == completions(loaded(source), source)
    assert len(list(slim.glob("*.safetensors"))) > LAYERS
    assert not list(slim.parent.glob(".*"))
    names = {file.name for file in slim.iterdir() if "safetensors" not in file.name}
    reports = {"slim_report.json", "slim_report.png"}
    assert names >= {"config.json", "modeling_slim.py", "generation_config.json", "tokenizer.json", *reports}
    assert "conversion.json" not in names


def test_shards_are_no_larger_than_asked_where_tensors_allow(slim: Path) -> None:
    for file in slim.glob("*.safetensors"):
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= SHARD


def test_it_is_what_the_loaded_model_becomes(source: Path, slim: Path) -> None:
    model = loaded(source)
    ids = calibration_ids(AutoTokenizer.from_pretrained(source), limit=256)
    in_memory = to_slim(model, ids, rank=3)
    streamed = loaded(slim)
    assert streamed.config.slim_layers == in_memory.config.slim_layers
    with torch.no_grad():
        torch.testing.assert_close(streamed(ids[None]).logits, in_memory(ids[None]).logits, rtol=1e-3, atol=1e-3)


def test_report(source: Path, tmp_path: Path) -> None:
    report = convert_checkpoint(settings(source, tmp_path / "made", verify=True))
    assert json.loads((tmp_path / "made" / "slim_report.json").read_text()) == json.loads(json.dumps(report))
    layers = report["layers"]
    assert len(layers) == LAYERS
    assert report["bytes_per_token"] == sum(layer["bytes_per_token"] for layer in layers)
    assert report["ordinary_bytes_per_token"] == LAYERS * 2 * 32 * 4
    assert 0 < report["saved"] < 1
    for layer in layers:
        assert layer["output_error"] <= 2 * layer["measured"]["ordinary"]["output_error"]
        assert len(layer["measured"]["singular_values"]) == 32
    checked = report["verification"]
    assert checked["slim_error"] <= checked["bound"]


def test_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    before = contents(source)
    report = convert_checkpoint(settings(source, None))
    assert len(report["layers"]) == LAYERS
    assert contents(source) == before
    assert not list(tmp_path.iterdir())


class Killed(BaseException):
    """Ends the conversion where it is raised, as SIGKILL does."""


def kill(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, after: int) -> None:
    """Let a function be called so many times, and end the conversion in the next call."""
    run, calls = getattr(place, name), [0]

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise Killed
        return run(*args, **kwargs)

    monkeypatch.setattr(place, name, dying)


@pytest.mark.parametrize(
    ("place", "name", "after"),
    [
        *((SlimStream, "group", after) for after in range(LAYERS + 1)),
        ("hf_fastdecode.conversion.shards", "save_file", 4),
        ("hf_fastdecode.conversion.shards", "write_json", 2),
        (ShardWriter, "finish", 0),
        (convert, "draw_report", 0),
        (ShardWriter, "publish", 0),
        ("os", "rename", 0),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2] if hasattr(value, "__name__") else str(value),
)
def test_killed_and_resumed(
    source: Path, slim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, after: int
) -> None:
    before, target = contents(source), tmp_path / "made"
    options = settings(source, target, choice=PlanChoice(rank=3))
    with monkeypatch.context() as patch:
        kill(patch, import_module(place) if isinstance(place, str) else place, name, after)
        with pytest.raises(Killed):
            convert_checkpoint(options)
    assert contents(source) == before
    assert not target.exists()
    (left,) = tmp_path.iterdir()
    if name != "rename":  # then it is whole
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(left)
    with pytest.raises(ValueError, match=r"was interrupted; `resume=True` continues it"):
        convert_checkpoint(options)
    other = settings(source, target, choice=PlanChoice(rank=4), resume=True)
    with pytest.raises(ValueError, match="had another rank"):
        convert_checkpoint(other)
    convert_checkpoint(settings(source, target, choice=PlanChoice(rank=3), resume=True))
    assert contents(target) == contents(slim)
    assert [one.name for one in tmp_path.iterdir()] == ["made"]


def test_resuming_skips_layers_that_are_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, groups = tmp_path / "made", []
    with monkeypatch.context() as patch:
        kill(patch, SlimStream, "group", LAYERS)
        with pytest.raises(Killed):
            convert_checkpoint(settings(source, target))
    run = SlimStream.group
    monkeypatch.setattr(SlimStream, "group", lambda self, index: groups.append(index) or run(self, index))
    convert_checkpoint(settings(source, target, resume=True))
    assert groups == [LAYERS - 1, LAYERS]  # the one before was not on disk yet


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biases", [False, True])
def test_round_trip(tmp_path: Path, dtype: torch.dtype, biases: bool) -> None:
    """Recovered values are off by what was reported, everything else is as it was, and the model computes the same."""
    source = save_multi_head(tmp_path / "source", dtype, attention_bias=biases)
    original = loaded(source)
    if biases:
        with torch.no_grad():
            for name, parameter in original.named_parameters():
                if name.endswith("_proj.bias"):
                    parameter.normal_(std=0.3)
        original.save_pretrained(source, max_shard_size="100KB")
    convert_checkpoint(settings(source, tmp_path / "slim", choice=PlanChoice(rank=8)))
    report = convert_checkpoint(settings(tmp_path / "slim", tmp_path / "full", format="full"))
    full = loaded(tmp_path / "full")
    assert type(full) is type(original)
    assert full.dtype == dtype
    for name, tensor in full.state_dict().items():
        expected = original.state_dict()[name]
        if "v_proj.weight" not in name:
            if "v_proj.bias" not in name:
                assert torch.equal(tensor, expected), name
            continue
        error = torch.linalg.norm(tensor.double() - expected.double()) / torch.linalg.norm(expected.double())
        reported = report["layers"][int(name.split(".")[2])]["recovered_error"]
        assert error.item() == pytest.approx(reported, rel=1e-6)
        assert reported < 20 * torch.finfo(dtype).eps
    ids = torch.arange(40)[None]
    with torch.no_grad():
        found, expected = full(ids).logits.double(), original(ids).logits.double()
    assert torch.linalg.norm(found - expected) / torch.linalg.norm(expected) < 100 * torch.finfo(dtype).eps


def test_code_of_checkpoints_is_replaced_and_dropped(tmp_path: Path) -> None:
    """Code of the source's own (as of older Phi-3) is not copied, so no config may refer to it."""
    source = save_multi_head(tmp_path / "source", auto_map={"AutoModelForCausalLM": "modeling_old.Old"})
    convert_checkpoint(settings(source, tmp_path / "slim", choice=PlanChoice("kv")))
    convert_checkpoint(settings(tmp_path / "slim", tmp_path / "full", format="full"))
    slim, full = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("slim", "full"))
    assert slim["auto_map"]["AutoModelForCausalLM"] == "modeling_slim.SlimLlamaForCausalLM"
    assert "auto_map" not in full
    assert not list((tmp_path / "full").glob("*.py"))


def test_torch_files_and_tied_embeddings(tmp_path: Path) -> None:
    folder = save_multi_head(tmp_path / "source", tie_word_embeddings=True)
    state = loaded(folder).state_dict()
    for file in folder.glob("model*"):
        file.unlink()
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # as checkpoints of Llama 1 have it
    torch.save({**state, **old}, folder / "pytorch_model.bin")
    convert_checkpoint(settings(folder, tmp_path / "made"))
    slim = loaded(tmp_path / "made")
    assert slim.lm_head.weight is slim.model.embed_tokens.weight
    assert completions(slim, folder) == completions(loaded(folder), folder)


def test_torch_files_whose_tensors_share_memory(tmp_path: Path) -> None:
    """A model's head was tied by hand, whatever its config says."""
    folder = save_multi_head(tmp_path / "source")
    model = loaded(folder)
    model.lm_head.weight = model.model.embed_tokens.weight
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    convert_checkpoint(settings(folder, tmp_path / "made", shard_bytes=10**9))
    assert completions(loaded(tmp_path / "made"), folder) == completions(model, folder)


def test_room_on_the_disk_is_estimated_from_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from masks in bytes, which checkpoints of GPT-2 by older releases begin with."""
    tokenizer = AutoTokenizer.from_pretrained(save_multi_head(tmp_path / "llama"))
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes))
    folder = tmp_path / "source"
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 256, 256, dtype=torch.uint8)
    torch.save(state, folder / "pytorch_model.bin")
    free = 2 * (folder / "pytorch_model.bin").stat().st_size
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": free})())
    convert_checkpoint(settings(folder, tmp_path / "made", choice=PlanChoice("kv")))


def test_dtype_and_plan_per_layer(source: Path, tmp_path: Path) -> None:
    plans = (("kv", 0), ("k", 0), ("k+r", 5))
    choice = PlanChoice(plans)
    convert_checkpoint(settings(source, tmp_path / "made", choice=choice, dtype=torch.bfloat16))
    slim = loaded(tmp_path / "made", dtype="auto")
    assert slim.dtype == torch.bfloat16
    assert [(layer["plan"], layer["rank"]) for layer in slim.config.slim_layers] == list(plans)
    assert slim.config.slim_matrix_dtype == "float16"
    assert not list((tmp_path / "made").glob("*.partial"))


def test_verification_fails_for_keys_alone_in_bf16(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "made"
    options = {"choice": PlanChoice("k", tolerance=1.0), "dtype": torch.float16, "verify": True}
    with pytest.raises(VerificationError, match=r"off by .*, and may be by"):
        convert_checkpoint(settings(source, target, **options))
    assert not target.exists()
    convert_checkpoint(settings(source, target, **{**options, "verify": False}, resume=True))
    assert loaded(target, dtype="auto").dtype == torch.float16


def test_verification_is_not_loosened_by_the_condition_number(tmp_path: Path) -> None:
    """In fp32 too, where keys of condition number 1e7 make logits of which a quarter name other tokens."""

    def steepen(model: PreTrainedModel) -> None:
        for layer in model.model.layers:
            left, values, right = torch.linalg.svd(layer.self_attn.k_proj.weight.double())
            steep = values[0] * torch.logspace(0, -7, len(values), dtype=torch.float64)
            layer.self_attn.k_proj.weight.copy_((left * steep) @ right)

    source = changed(tmp_path / "source", steepen)
    with pytest.raises(VerificationError):
        convert_checkpoint(settings(source, tmp_path / "made", choice=PlanChoice("k"), verify=True))
    report = convert_checkpoint(settings(source, tmp_path / "auto", verify=True))
    assert report["verification"]["bound"] < 1e-5


@pytest.mark.parametrize("plan", ["auto", "kv"])
def test_weights_that_are_not_finite(tmp_path: Path, plan: str) -> None:
    target = tmp_path / "made"
    source = changed(
        tmp_path / "source", lambda model: model.model.layers[1].self_attn.v_proj.weight[3, 4].fill_(torch.nan)
    )
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.v_proj.weight holds 1 inf or nan; repair"):
        convert_checkpoint(settings(source, target, choice=PlanChoice(plan)))
    assert [one.name for one in tmp_path.iterdir()] == ["source"]


def test_an_embedding_that_the_calibration_text_does_not_meet_is_not_finite(tmp_path: Path) -> None:
    source = changed(tmp_path / "source", lambda model: model.model.embed_tokens.weight[-1, 0].fill_(torch.inf))
    with pytest.raises(ValueError, match=r"model.embed_tokens.weight holds 1 inf or nan"):
        convert_checkpoint(settings(source, tmp_path / "made"))


def test_weights_beyond_the_range_of_the_dtype_asked_for(tmp_path: Path) -> None:
    source = changed(tmp_path / "source", lambda model: model.model.layers[0].mlp.up_proj.weight[0, 0].fill_(1e5))
    with pytest.raises(
        ValueError, match=r"up_proj.weight holds 1e\+05, beyond the range of torch.float16; give `dtype="
    ):
        convert_checkpoint(settings(source, tmp_path / "made", dtype=torch.float16))


def test_a_model_that_overflows_in_its_dtype_is_told_a_wider_one(tmp_path: Path) -> None:
    """Weights that fit into fp16 may give activations that do not; bf16 has room for them."""

    def overflow(model: PreTrainedModel) -> None:
        mlp = model.model.layers[0].mlp
        mlp.up_proj.weight.mul_(100)
        mlp.down_proj.weight.mul_(30_000)

    source = changed(tmp_path / "source", overflow, torch.float16)
    with pytest.raises(
        ValueError, match=r"hold inf or nan in torch\.float16, whose largest number is 65504; .* such as bfloat16"
    ):
        convert_checkpoint(settings(source, None))
    assert len(convert_checkpoint(settings(source, None, dtype=torch.bfloat16))["layers"]) == LAYERS


def test_a_layer_whose_values_are_all_zero(tmp_path: Path) -> None:
    source = changed(tmp_path / "source", lambda model: model.model.layers[1].self_attn.v_proj.weight.zero_())
    report = convert_checkpoint(settings(source, tmp_path / "made", choice=PlanChoice(rank=3)))
    assert report["layers"][1]["recovered_error"] == 0
    assert completions(loaded(tmp_path / "made"), source) == completions(loaded(source), source)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A Hub whose repositories are folders below ``hub``; returns the folder of downloads."""
    downloads = tmp_path / "downloads"

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        target = downloads / name
        target.mkdir(parents=True, exist_ok=True)
        for file in (tmp_path / "hub" / name).iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copyfile(file, target / file.name)
        return str(target)

    def load_config(name: str) -> Any:
        folder = tmp_path / "hub" / name
        return model_names.load_config(str(folder) if folder.is_dir() else name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(source_module, "load_config", load_config)
    return downloads


def test_weights_are_downloaded_after_the_config_was_checked(hub: Path, tmp_path: Path) -> None:
    source = save_multi_head(tmp_path / "hub" / "user" / "model")
    (source / "training_args.bin").write_bytes(b"no weights")
    assert convert_checkpoint(Settings("user/model", None))["model_type"] == "llama"
    found = {file.name for file in (hub / "user" / "model").iterdir()}
    assert found == {file.name for file in source.iterdir()} - {"training_args.bin"}


def test_weights_of_what_is_refused_are_not_downloaded(hub: Path, tmp_path: Path) -> None:
    save_multi_head(tmp_path / "hub" / "user" / "grouped", num_key_value_heads=2)
    with pytest.raises(ValueError, match="got 2 != 4"):
        convert_checkpoint(Settings("user/grouped", None))
    assert not list((hub / "user" / "grouped").glob("*.safetensors"))
    with pytest.raises(ValueError, match="not slim"):
        convert_checkpoint(Settings("user/grouped", None, format="full"))


def test_a_refused_folder_needs_no_weights(tmp_path: Path) -> None:
    folder = save_multi_head(tmp_path / "grouped", num_key_value_heads=2)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="got 2 != 4"):
        convert_checkpoint(Settings(str(folder), None))


def test_weights_in_torch_files(hub: Path, tmp_path: Path) -> None:
    source = tmp_path / "hub" / "user" / "old"
    source.mkdir(parents=True)
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "pytorch_model.bin").write_bytes(b"weights")
    folder, model_type = find_checkpoint("user/old", lambda config: config.model_type)
    assert (folder / "pytorch_model.bin").is_file()
    assert model_type == "llama"


def test_no_such_repository(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no folder user/none, the .* Hub is not reachable, .*; name a local folder"):
        find_checkpoint("user/none", lambda config: None)
