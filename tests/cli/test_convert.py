"""`hf-fastdecode convert-checkpoint`: what it prints, and how it refuses."""

from __future__ import annotations

import errno
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_fastdecode.conversion.fit.layer_plan import dtype_name

from ..conversion.checkpoints import contents, save_multi_head
from .command_line import needs_weights, ran, refusal, run

refused = partial(refusal, "convert-checkpoint")


def words_of_verification(printed: str) -> str:
    """Without numbers, and line breaks, which depend on these."""
    return re.sub(r"\d[\d.e-]*", "", " ".join(printed.partition("Verified: ")[2].split()))


def test_there_and_back(source: Path, tmp_path: Path) -> None:
    slim, full = tmp_path / "slim", tmp_path / "full"
    done = ran("convert-checkpoint", source, slim, "--max-shard-size", "100KB", "--verify")
    assert "saved" in done.stdout
    assert "Verified" in done.stdout
    assert f"wrote {slim}" in done.stderr
    assert (slim / "slim_report.png").stat().st_size > 1000
    verified = words_of_verification(done.stdout)
    done = ran("convert-checkpoint", slim, full, "--format", "full", "--verify")
    assert "error of W_V" in done.stdout
    assert words_of_verification(done.stdout) == verified
    assert type(AutoModelForCausalLM.from_pretrained(full)).__name__ == "LlamaForCausalLM"
    done = ran("inspect", slim)
    assert "what its layers cache" in " ".join(done.stdout.split())  # a long path moves the words to other lines
    ran("generate", "--model", slim, "--prompt", "def f(x):", "--max-new-tokens", 4, "--greedy")


@needs_weights
def test_dry_run_of_the_embedded_model(tmp_path: Path) -> None:
    """It is multi-head; in bf16 most of half its cache is saved within the tolerance."""
    done = run("convert-checkpoint", "embedded", "--dtype", "bfloat16", "--dry-run", "--json")
    report = json.loads(done.stdout)
    assert report["ordinary_bytes_per_token"] == 4096
    assert 0.4 <= report["saved"] <= 0.5
    assert all(one["output_error"] <= 2 * one["measured"]["ordinary"]["output_error"] for one in report["layers"])


def test_cache_dtypes(source: Path, tmp_path: Path) -> None:
    """In the report, in the table and in the config; verified beside int8 keys and values."""
    arguments = ("--cache-dtype", "int8", "--dtype", "bfloat16")
    done = ran("convert-checkpoint", source, tmp_path / "slim", *arguments, "--verify")
    assert "int8" in done.stdout
    report = json.loads((tmp_path / "slim" / "slim_report.json").read_text())
    plain = json.loads(ran("convert-checkpoint", source, "--dry-run", "--dtype", "bfloat16", "--json").stdout)
    assert (report["cache_dtype"], plain["cache_dtype"]) == ("int8", "auto")
    assert {layer["dtype"] for layer in report["layers"]} == {"int8"}
    assert {layer["dtype"] for layer in plain["layers"]} <= {"float16", "bfloat16"}
    assert report["bytes_per_token"] < plain["bytes_per_token"]
    config = json.loads((tmp_path / "slim" / "config.json").read_text())
    assert {layer["cache_dtype"] for layer in config["slim_layers"]} == {"int8"}
    ran("convert-checkpoint", tmp_path / "slim", tmp_path / "full", "--format", "full")
    done = run("convert-checkpoint", source, "--dry-run", *arguments, "--plan", "k")
    assert "Layer 0: not in int8, which has at best" in " ".join(done.stdout.split())
    assert "for layers in 8 bits" not in done.stdout


def test_both_spellings_of_a_cache_dtype(source: Path) -> None:
    words = ("convert-checkpoint", source, "--dry-run", "--json", "--cache-dtype")
    for short, name in (("fp16", "float16"), ("bf16", "bfloat16"), ("fp8", "float8_e4m3fn")):
        reports = [json.loads(ran(*words, spelling).stdout) for spelling in (short, name)]
        assert reports[0] == reports[1]
        assert reports[0]["cache_dtype"] == name


@pytest.mark.usefixtures("undrawn")
def test_rope(source: Path, tmp_path: Path) -> None:
    done = ran("convert-checkpoint", source, tmp_path / "slim", "--rope", "unrotate", "--verify")
    assert "Verified" in done.stdout
    assert json.loads((tmp_path / "slim" / "slim_report.json").read_text())["rope"] == "unrotate"
    assert json.loads((tmp_path / "slim" / "config.json").read_text())["slim_rope"] == "unrotate"


@pytest.mark.usefixtures("undrawn")
def test_plan_files(source: Path, tmp_path: Path) -> None:
    plans = [{"plan": "kv"}, {"plan": "k+r", "rank": 4}, {"plan": "k"}]
    (tmp_path / "plan.json").write_text(json.dumps(plans))
    done = run("convert-checkpoint", source, tmp_path / "slim", "--plan", tmp_path / "plan.json", "--json")
    report = json.loads(done.stdout)
    assert [(one["plan"], one["rank"]) for one in report["layers"]] == [("kv", 0), ("k+r", 4), ("k", 0)]
    for file in ("config.json", "slim_report.json"):
        done = run("convert-checkpoint", source, "--dry-run", "--plan", tmp_path / "slim" / file, "--json")
        assert [one["rank"] for one in json.loads(done.stdout)["layers"]] == [0, 4, 0]


def test_plans_that_cost_accuracy_or_save_nothing(source: Path) -> None:
    def printed(*options: object) -> str:
        return " ".join(run("convert-checkpoint", source, "--dry-run", *options).stdout.split())

    inaccurate = "Less accurate than --tolerance 1: layers 0, 1, 2."
    assert inaccurate in printed("--plan", "k", "--tolerance", 1)
    assert "Less accurate" not in printed("--plan", "k", "--tolerance", 1e6)
    assert "this conversion saves nothing" in printed("--plan", "kv")
    assert "saves nothing" not in printed()


def test_a_plan_file_nested_too_deeply(source: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[" * 100_000)
    assert "nor a JSON file of plans" in refused(source, "--dry-run", "--plan", tmp_path / "plan.json")


@pytest.mark.usefixtures("undrawn")
def test_a_report_that_cannot_be_read_is_as_none(source: Path, tmp_path: Path) -> None:
    """It tells of the conversion: what is recovered does not need it, but how exactly depends on it."""
    ran("convert-checkpoint", source, tmp_path / "slim", "--plan", "k")
    for index, content in enumerate(("3", '{"layers": 3}', '{"layers": [{"plan": "k"}]}', '{"layers": []}')):
        (tmp_path / "slim" / "slim_report.json").write_text(content)
        back = ("convert-checkpoint", tmp_path / "slim", tmp_path / f"full-{index}", "--format", "full")
        assert "--verify needs the layers' errors in" in refused(*back[1:], "--verify")
        ran(*back)


def test_help_teaches() -> None:
    text = " ".join(run("convert-checkpoint", "--help").stdout.split())
    for words in ("multi-head", "condition number", "import hf_fastdecode", "grouped-query"):
        assert words in text


def test_options_that_do_not_go_together(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "slim"
    for arguments, message in (
        ((source,), "name the folder to make"),
        ((source, target, "--format", "slimmer"), "--format must be one of slim, full, got 'slimmer'"),
        ((source, "--dry-run", "--resume"), "--dry-run writes nothing that --resume could read"),
        ((source, target, "--max-shard-size", "5 potatoes"), "must be a size such as 500MB"),
        ((source, target, "--dtype", "int8"), "--dtype must be one of"),
        ((source, target, "--plan", "k", "--rank", 3), "leave one out"),
        ((source, target, "--plan", "kr"), "kr is neither a plan (auto, k, x, e, kv) nor a JSON file"),
        ((source, target, "--rank", 33), "between 0 and 32"),
        ((source, target, "--tolerance", 0.5), "at least 1"),
        ((source, target, "--tolerance", "inf"), "must be a number of at least 1"),
        ((source, target, "--cache-dtype", "int4"), "--cache-dtype must be one of auto, float16 (fp16), "),
        ((source, target, "--rope", "both"), "--rope must be one of raw, unrotate, got 'both'"),
        ((source, target, "--calibration", tmp_path / "none.txt"), "name a UTF-8 text file"),
    ):
        assert message in refused(*arguments), arguments
    assert not list(tmp_path.iterdir())


def test_calibration_texts(source: Path, tmp_path: Path) -> None:
    """Of a large file the beginning is read; short texts are refused."""
    text = tmp_path / "text.txt"
    text.write_text("def half(x):\n    return x / 2\n" * 20_000)
    with text.open("ab") as stream:
        stream.write(b"\xff")  # no UTF-8, beyond what is read
    done = run("convert-checkpoint", source, "--dry-run", "--calibration", text, "--json")
    assert json.loads(done.stdout)["calibration_tokens"] == 256  # which the model takes
    text.write_text("short")
    assert "a calibration text needs 32 tokens, got" in refused(source, "--dry-run", "--calibration", text)
    few = save_multi_head(tmp_path / "few", max_position_embeddings=16)
    assert "measured on 32 tokens or more, and the model takes 16" in refused(few, "--dry-run")


def test_options_that_do_nothing(source: Path, tmp_path: Path) -> None:
    for option, value in (
        ("--plan", "k"),
        ("--rank", 3),
        ("--cache-dtype", "int8"),
        ("--rope", "unrotate"),
        ("--tolerance", 1),
        ("--calibration", "text.txt"),
        ("--transcript", "text.txt"),
    ):
        message = refused(source, tmp_path / "full", "--format", "full", option, value)
        assert f"{option} does nothing with --format full" in message


@pytest.mark.usefixtures("undrawn")
def test_existing_target(source: Path, tmp_path: Path) -> None:
    (tmp_path / "slim").mkdir()
    (tmp_path / "slim" / "mine.txt").write_text("mine")
    assert "exists; name another folder" in refused(source, tmp_path / "slim")
    assert "--tolerance must be" in refused(source, tmp_path / "slim", "--tolerance", 0.5)
    assert contents(tmp_path / "slim") == {"mine.txt": b"mine"}


def test_models_that_have_no_slim_form(tmp_path: Path) -> None:
    grouped = save_multi_head(tmp_path / "grouped", num_key_value_heads=2)
    assert "got 2 != 4" in refused(grouped, tmp_path / "slim")
    assert "int8 KV cache may serve" in refused(grouped, "--dry-run")
    quantised = save_multi_head(tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}})
    )
    assert "is quantised" in refused(quantised, tmp_path / "slim")
    other = {**config, "model_type": "mistral"}
    (quantised / "config.json").write_text(json.dumps(other))
    assert "no slim form of mistral" in refused(quantised, tmp_path / "slim")
    (quantised / "config.json").write_text(json.dumps({**config, "model_type": "bitnet"}))
    assert "round their inputs and weights" in refused(quantised, tmp_path / "slim")
    chronos = {"model_type": "t5", "is_encoder_decoder": True, "chronos_config": {"input_patch_size": 16}}
    (quantised / "config.json").write_text(json.dumps(chronos))
    assert "one pass for each forecast" in refused(quantised, tmp_path / "slim")
    assert "not slim but of type llama" in refused(grouped, tmp_path / "full", "--format", "full")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["grouped", "quantised"]


def test_layers_of_another_architecture(tmp_path: Path) -> None:
    """A config of Llama, and layers with norms that Llama has not: such checkpoints come with classes of their own."""
    folder = save_multi_head(tmp_path / "other")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.layers.1.input_layernorm.weight" in tensors:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            index["weight_map"]["model.layers.1.self_attn.inner_attn_ln.weight"] = file.name
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            save_file({**tensors, "model.layers.1.self_attn.inner_attn_ln.weight": torch.ones(32)}, file)
    assert "layer 1 has a tensor self_attn.inner_attn_ln.weight, which layers of llama" in refused(
        folder, tmp_path / "slim"
    )
    assert [one.name for one in tmp_path.iterdir()] == ["other"]


def test_singular_keys(tmp_path: Path) -> None:
    """Layers without a slim form keep keys and values, with the reason; demanded, they are refused."""
    folder = save_multi_head(tmp_path / "singular")
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if (name := "model.layers.1.self_attn.k_proj.weight") in tensors:
            tensors[name][3] = 0
            save_file(tensors, file, {"format": "pt"})
    assert "layer 1 cannot have plan 'k': the smallest singular value" in refused(
        folder, tmp_path / "slim", "--plan", "k"
    )
    assert [one.name for one in tmp_path.iterdir()] == ["singular"]
    done = ran("convert-checkpoint", folder, tmp_path / "slim")
    assert "Layer 1: the smallest singular value" in " ".join(done.stdout.split())


def deny(patch: pytest.MonkeyPatch, method: str, pattern: str) -> None:
    """Deny the permission to read such files."""
    allowed = getattr(Path, method)

    def denied(path: Path, *args: Any, **options: Any) -> Any:
        if path.match(pattern):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return allowed(path, *args, **options)

    patch.setattr(Path, method, denied)


def test_damaged_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "slim"
    assert "there is no file or folder" in refused(tmp_path / "nowhere", target)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json; name a folder saved with save_pretrained" in refused(empty, target)
    folder = save_multi_head(tmp_path / "source")
    shards = sorted(folder.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    assert "is cut off or damaged" in refused(folder, target)
    shards[1].unlink()
    assert f"there is no {shards[1]}, which model.safetensors.index.json names" in refused(folder, target)
    shards[1].write_bytes(whole)
    for pattern, method in (("*.safetensors", "open"), ("*.index.json", "read_text")):
        with monkeypatch.context() as patch:
            deny(patch, method, pattern)
            assert re.search("cannot read .*: Permission denied; fix that", refused(folder, target))
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    name = next(name for name, file in places.items() if file == shards[1].name)
    index.write_text(json.dumps({"weight_map": {**places, name: shards[0].name}}))
    assert f"there is no {name} in {shards[0]}, where the index names it" in refused(folder, target)
    index.write_text(json.dumps({"weight_map": list(places)}))
    assert "is no index of weights" in refused(folder, target)
    index.write_text(json.dumps({"weight_map": places}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    assert "lacks model.layers.3." in refused(folder, target)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    surplus = "holds model.layers.2.input_layernorm.weight, of a layer that its config lacks"
    assert surplus in refused(folder, target)
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    assert "of shape" in refused(folder, target)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 0}))
    assert "has 0 layers (num_hidden_layers)" in refused(folder, target)
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": {"rope_type": "none such"}}))
    assert "transformers makes no model of" in refused(folder, target)
    (folder / "config.json").write_text(json.dumps(config))
    for dtype in (torch.int32, torch.int8):
        tensors = load_file(shards[1])
        changed = next(name for name in tensors if name.endswith("proj.weight"))
        save_file({**tensors, changed: tensors[changed].to(dtype)}, shards[1], {"format": "pt"})
        line = refused(folder, target, "--dtype", "float16")
        assert f"{changed} in {folder} is of dtype {dtype_name(dtype)}, as quantized" in line
        shards[1].write_bytes(whole)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "no tokenizer that can be loaded" in refused(folder, target)
    assert not target.exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.usefixtures("undrawn")
def test_full_disks(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, place = tmp_path / "slim", "hf_fastdecode.conversion"
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
        assert "make space, or name a folder on another disk" in refused(source, target)
    assert not list(tmp_path.iterdir())

    for reason, option in (
        ("No space left on device (os error 28)", ()),
        ("File too large (os error 27)", ("--resume",)),
    ):

        def fail(*_: object, reason: str = reason) -> None:
            raise SafetensorError(f"Error while serializing: I/O error: {reason}")

        with monkeypatch.context() as patch:
            patch.setattr(f"{place}.shards.save_file", fail)
            message = refused(source, target, *option)
            assert f"shard-00001.safetensors: {reason.partition(' (')[0]}; fix that and continue with" in message
        assert not target.exists()
    assert ". exists; name another folder" in refused(source, ".")
    ran("convert-checkpoint", source, target, "--resume")
    assert AutoModelForCausalLM.from_pretrained(target).dtype == torch.float32


def test_a_failed_verification_has_exit_code_1(source: Path, tmp_path: Path) -> None:
    options = ("--plan", "k", "--tolerance", 1, "--dtype", "float16", "--verify")
    done = run("convert-checkpoint", source, tmp_path / "slim", *options)
    assert done.exit_code == 1
    assert "logits of the slim model are off by" in done.stderr
    assert [str(one) for one in tmp_path.iterdir()] == [done.stderr.strip().rpartition("else delete ")[2]]
