"""What `hf-fastdecode inspect` prints of slim caches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ..conversion.checkpoint.checkpoints import save_multi_head
from .command_line import needs_weights, run

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
WHISPER = {"model_type": "whisper", "d_model": 384, "encoder_layers": 1, "decoder_layers": 4}


def config_file(folder: Path, name: str, fields: Any) -> Path:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(fields))
    return file


def words(*arguments: object) -> str:
    done = run("inspect", *arguments)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def test_several_models_in_json(tmp_path: Path) -> None:
    files = [config_file(tmp_path, "llama", LLAMA), config_file(tmp_path, "whisper", WHISPER)]
    done = run("inspect", *files, "--dtype", "float16", "--context", 100, 448, "--batch", 2, "--json")
    llama, whisper = map(json.loads, done.stdout.splitlines())
    assert (llama["model"], llama["slim_refused"], llama["can_share"]) == (str(files[0]), None, True)
    assert [caches["context"] for caches in llama["caches"]] == [100, 448]
    keys = llama["caches"][0]["sizes"][1]
    assert (keys["cache"], keys["bytes"], keys["of_kv"]) == ("keys", 100 * 3 * 64 * 2, 0.5)
    assert keys["per_token"][0]["batch"] == 2
    assert keys["per_token"][0]["bytes_read"] == keys["bytes_read"] + keys["matrix_bytes"] / 2
    assert whisper["caches"][1]["encoder_tokens"] == 1500
    speedups = {one["cache"]: one["per_token"][0]["speedup_at_most"] for one in whisper["caches"][1]["sizes"]}
    ordinary, second = 5_984_256 + 28_173_696 / 2, 688_128 + 29_353_344 / 2  # section 7, in activations
    assert speedups["E on chip, keys"] == pytest.approx(ordinary / second, abs=1e-4)
    assert "rows" not in whisper


def test_tables(tmp_path: Path) -> None:
    text = words(
        config_file(tmp_path, "llama", LLAMA), config_file(tmp_path, "whisper", WHISPER), "--dtype", "float16"
    )
    assert "can share" in text
    assert "caches of 2,048 tokens, float16" in text
    assert "keys + d/32" in text
    assert "caches of 448 tokens and 1,500 of the encoder, float16" in text
    assert "│ E on chip, keys │ 2.4 MiB │ 21.1% │" in text
    assert "bounds from sizes" in text


def test_the_reason_is_the_converters(tmp_path: Path) -> None:
    grouped = save_multi_head(tmp_path / "grouped", num_key_value_heads=2)
    refused = run("convert-checkpoint", grouped, "--dry-run").stderr.removeprefix("hf-fastdecode: ").strip()
    assert "got 2 != 4" in refused
    assert f"refused: {refused}" in words(grouped)


@pytest.mark.usefixtures("undrawn")
def test_slim_checkpoints(tmp_path: Path) -> None:
    """What `convert-checkpoint` reported of each layer is what its config tells `inspect`."""
    source = save_multi_head(tmp_path / "source", torch.bfloat16)
    plan = config_file(tmp_path, "plan", [{"plan": "kv"}, {"plan": "k"}, {"plan": "k+r", "rank": 5}])
    for dtype in ("auto", "int8"):
        command = ["convert-checkpoint", source, tmp_path / dtype, "--plan", plan, "--cache-dtype", dtype]
        report = json.loads(run(*command, "--tolerance", 1e9, "--json").stdout)
        found = json.loads(run("inspect", tmp_path / dtype, "--context", 10, "--json").stdout)
        expected = [{key: one[key] for key in found["slim_layers"][0]} for one in report["layers"]]
        assert found["slim_layers"] == expected
        kv, slim, int8 = found["caches"][0]["sizes"]
        assert (kv["cache"], slim["cache"], int8["cache"]) == ("keys and values", "slim", "int8 keys and values")
        assert slim["bytes"] == 10 * report["bytes_per_token"]
        assert kv["bytes"] == 10 * report["ordinary_bytes_per_token"]
        assert slim["per_token"][0]["bytes_read"] == slim["bytes"] + slim["matrix_bytes"]
        assert "rows" not in found
    text = words(tmp_path / "auto")
    for cells in ("│ 0 │ keys, values │ bf16 │", "│ 1 │ keys │ fp16 │ 64 │", "│ 2 │ keys+5 │ fp16 │ 74 │"):
        assert cells in text
    assert "│ slim │" in text
    assert "bounds from sizes" not in text


def test_slim_encoder_decoders(tmp_path: Path) -> None:
    """Cross-attention reads the encoder's output, which is counted on chip and read, as for ordinary configs."""
    layers = [{"plan": "x"}, {"plan": "e"}] * 4
    slim = config_file(tmp_path, "slim", WHISPER | {"model_type": "slim_whisper", "slim_layers": layers})
    found = json.loads(run("inspect", slim, "--dtype", "float16", "--json").stdout)
    ordinary = json.loads(
        run("inspect", config_file(tmp_path, "plain", WHISPER), "--dtype", "float16", "--json").stdout
    )
    kv, on_chip, read, _ = found["caches"][0]["sizes"]
    assert kv == ordinary["caches"][0]["sizes"][0]
    assert on_chip["bytes_read"] == 448 * 4 * 384 * 2
    assert on_chip["bytes"] == read["bytes"] == on_chip["bytes_read"] + 1500 * 384 * 2
    assert read["bytes_read"] == on_chip["bytes_read"] + 4 * 1500 * 384 * 2
    assert on_chip["matrix_bytes"] == kv["matrix_bytes"] + 4 * 2 * 384 * 384 * 2
    text = words(slim, "--dtype", "float16")
    for cells in (
        "│ self 0 to 3 │ inputs │ fp16 │ 768 │",
        "│ cross 0 to 3 │ nothing │ - │ 0 │",
        "│ slim, E on chip │",
    ):
        assert cells in text


def test_multimodal_models(tmp_path: Path) -> None:
    """The language model is what is counted."""
    text = LLAMA | {"num_key_value_heads": 8}
    files = [
        config_file(tmp_path, name, fields)
        for name, fields in (("llava", {"model_type": "llava", "text_config": text}), ("llama", text))
    ]
    llava, llama = (
        json.loads(run("inspect", file, "--dtype", "float16", "--context", 100, "--json").stdout) for file in files
    )
    assert llava["slim_refused"] is None
    assert llava["caches"] == llama["caches"]


@needs_weights
def test_bytes_are_those_of_a_dry_run() -> None:
    report = json.loads(
        run("convert-checkpoint", "embedded", "--dtype", "bfloat16", "--plan", "k", "--dry-run", "--json").stdout
    )
    found = json.loads(run("inspect", "embedded", "--dtype", "bfloat16", "--context", 1, "--json").stdout)
    sizes = {one["cache"]: one["bytes"] for one in found["caches"][0]["sizes"]}
    assert sizes["keys"] == report["bytes_per_token"]
    assert sizes["keys and values"] == report["ordinary_bytes_per_token"]


def test_help_names_the_bound() -> None:
    text = " ".join(run("inspect", "--help").stdout.split())
    for part in ("bounds from sizes", "convert-checkpoint --dry-run", "refuses"):
        assert part in text
