"""What `inspect` finds out about sharing and slim caches from a config, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

import hf_fastdecode as fd
from hf_fastdecode.cli.inspection.report import ModelReport, Sharing, inspect_model, sharing_text
from hf_fastdecode.errors import InputError

from ..conversion.checkpoints import save_multi_head
from .command_line import needs_weights, ran, run

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 97,
}
REPORT = ModelReport("tiny", "llama", "bfloat16", sharing=None, refused=None, caches=[])


def inspect(model_type: str = "llama", contexts=(100,), samples=(8,), new_tokens=10, dtype="auto", **other) -> Sharing:
    config = AutoConfig.for_model(model_type, **LLAMA | other)
    return sharing(config, contexts, samples, new_tokens=new_tokens, dtype=dtype)


def sharing(config: Any, contexts=(100,), samples=(8,), *, new_tokens: int, dtype: str) -> Sharing:
    found = inspect_model("tiny", config, contexts, samples, new_tokens=new_tokens, dtype=dtype).sharing
    assert found is not None
    return found


def test_rows_by_hand():
    found = inspect(contexts=(100, 200), samples=(8, 16), dtype="bfloat16")
    assert found.bytes_per_token == 2 * 2 * 2 * 16 * 2 == 256
    assert [(row.context, row.samples) for row in found.rows] == [(100, 8), (100, 16), (200, 8), (200, 16)]
    row = found.rows[0]
    assert row.kv_bytes == (8 * 110 * 256, (100 + 8 * 10) * 256)
    assert row.step_elements == (2 * 16 * 8 * 105, 2 * 16 * (100 + 8 * 5))
    assert row.step_bytes == (8 * 105 * 256, (100 + 8 * 5) * 256)
    assert (found.can_share, found.reason, row.stock_reason, row.note) == (True, "", None, None)


def test_json_has_numbers_and_ratios():
    fields = json.loads(json.dumps(inspect().to_json()))
    assert (fields["layers"], fields["query_heads"], fields["kv_heads"], fields["group_size"]) == (2, 4, 2, 2)
    assert (fields["attention"], fields["head_dim"], fields["max_positions"]) == ("GQA", 16, 512)
    assert fields["rows"][0]["kv_bytes"] == {"stock": 450560, "shared": 92160, "ratio": 4.8889}


def test_default_contexts_fit_the_model():
    assert [row.context for row in inspect(contexts=(), max_position_embeddings=20000).rows] == [512, 2048, 8192]
    assert [row.context for row in inspect(contexts=()).rows] == [502], "none of the usual lengths fits 512 positions"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"samples": (1,)}, "sharing would save 0 tokens, fewer than 64"),
        (
            {"contexts": (600,), "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "its position embedding changes beyond 512 tokens",
        ),
    ],
    ids=["one-sample", "too-long"],
)
def test_calls_that_run_stock(options, reason):
    found = inspect(**options)
    assert found.can_share is True
    assert found.rows[0].stock_reason == reason


@pytest.mark.parametrize("context", [502, 503])
def test_calls_longer_than_the_model_share_and_are_noted(context, capsys):
    found = inspect(contexts=(context,))
    note = "513 tokens are more than max_position_embeddings, 512: longer than the model was made for"
    (row,) = found.rows
    assert (row.stock_reason, row.note) == (None, note if context == 503 else None)
    assert found.to_json()["rows"][0]["note"] == row.note
    Console(width=120).print(sharing_text(REPORT, found))
    shown = capsys.readouterr().out
    assert (f"[1] {note}\n" in shown) == (f"[1] {context} " in shown) == (context == 503)
    assert f"{row.kv_bytes.ratio:.1f}x" in shown and "stock:" not in shown
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA)).eval()
    with fd.enabled(model):
        model.generate(torch.randint(3, 97, (1, context)), max_new_tokens=10, num_return_sequences=8, do_sample=True)
        assert fd.explain(model).last_call.path == "shared"


def test_a_note_and_a_reason_have_marks_of_their_own(capsys):
    Console(width=120).print(sharing_text(REPORT, inspect(contexts=(100, 600), samples=(1, 8))))
    shown = " ".join(capsys.readouterr().out.split())
    assert "[1] runs stock: sharing would save 0 tokens, fewer than 64 [2] 610 tokens are more than" in shown
    assert "[2] 600 │ 1 │" in shown and "[2] 600 │ 8 │" in shown


def test_a_window_cuts_what_a_step_reads_but_not_what_is_kept():
    found = inspect("mistral", sliding_window=40)
    (row,) = found.rows
    assert row.stock_reason is None
    assert row.kv_bytes == (8 * 40 * 512, (100 + 8 * 10) * 512)
    assert row.step_bytes == (8 * 40 * 512, (35 + 8 * 5) * 512)  # halfway, 5 of the 40 tokens are a row's own


@pytest.mark.parametrize("chunk", [109, 110])
def test_chunks_bind_where_generate_says_so(chunk):
    sizes = {"attention_chunk_size": chunk, "attn_temperature_tuning": False, "head_dim": 16, "num_local_experts": 2}
    config = AutoConfig.for_model("llama4_text", **LLAMA, **sizes, intermediate_size_mlp=64, pad_token_id=0)
    found = sharing(config, new_tokens=10, dtype="auto")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    with fd.enabled(model):
        model.generate(
            input_ids=torch.randint(3, 97, (1, 100)),
            max_new_tokens=10,
            num_return_sequences=8,
            do_sample=True,
            top_k=0,
        )
        call = fd.explain(model).last_call
    assert (call.path == "shared") == (found.rows[0].stock_reason is None)
    assert found.rows[0].stock_reason == ("chunks of 109 tokens are shorter than 110" if chunk == 109 else None)


def test_latents_are_counted():
    sizes = {"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "first_k_dense_replace": 2}
    found = inspect("deepseek_v3", dtype="bfloat16", **sizes)
    assert (found.can_share, found.bytes_per_token) == (True, 2 * 32 * 2)
    assert found.rows[0].kv_bytes == (8 * 110 * 128, (100 + 8 * 10) * 128)
    console = Console(width=200, no_color=True)
    with console.capture() as text:
        console.print(sharing_text(REPORT, found))
    assert "latent: 2 layers, h = 4 query heads over 32 elements of a token, 24 of them its latent" in text.get()
    assert " bytes (bfloat16, latents, all layers)" in text.get()


def test_a_model_that_cannot_share():
    config = AutoConfig.for_model("roformer", **LLAMA | {"vocab_size": 97})
    found = sharing(config, new_tokens=10, dtype="float16")
    assert found.can_share is False
    assert "plain causal attention" in found.reason  # its config lacks is_decoder
    assert found.rows[0].stock_reason == found.reason


@pytest.mark.parametrize("model_type", ["bert", "llama", "qwen2_moe", "gemma3_text", "roformer"])
def test_what_is_told_is_what_generate_does(model_type):
    sizes = {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    config = AutoConfig.for_model(
        model_type, **LLAMA | sizes | {"vocab_size": 97, "pad_token_id": 0, "eos_token_id": None}
    )
    found = sharing(config, new_tokens=4, dtype="auto")
    model = AutoModelForCausalLM.from_config(config).eval()
    with fd.enabled(model):
        prompt = torch.randint(3, 97, (1, 100))
        options = {"attention_mask": torch.ones_like(prompt), "do_sample": True, "num_return_sequences": 8}
        model.generate(prompt, **options, max_new_tokens=4)
        call = fd.explain(model).last_call
    assert found.can_share == (call.path == "shared")
    # A reason may name the length of the rows, of which there are none yet.
    assert found.reason.split()[:3] == (call.reason.split()[:3] if call.path == "stock" else [])


def test_sharing_is_unknown_when_the_model_cannot_be_built(monkeypatch):
    def fail(*args: object, **kwargs: object) -> None:
        raise ImportError("it needs another package\nand more")

    monkeypatch.setattr("hf_fastdecode.model_loading.AutoModelForCausalLM.from_config", fail)
    found = inspect()
    assert found.can_share is None
    assert found.reason == "the model could not be built from its config: it needs another package and more"


def test_what_cannot_be_counted():
    with pytest.raises(InputError, match=r"cannot count the KV of tiny: layer 0 of qwen3_next .* stores a state"):
        inspect("qwen3_next")
    with pytest.raises(InputError, match=r"`dtype` must be one of auto, float32 \(fp32\), .* got 'int8'"):
        inspect(dtype="int8")


CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8}
WHISPER = {"model_type": "whisper", "d_model": 384, "encoder_layers": 1, "decoder_layers": 4}


def config_file(folder: Path, name: str, fields: Any) -> Path:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(fields))
    return file


def words(*arguments: object) -> str:
    done = ran("inspect", *arguments)
    return " ".join(done.stdout.split())


def test_several_models_in_json(tmp_path: Path) -> None:
    files = [config_file(tmp_path, "llama", CONFIG), config_file(tmp_path, "whisper", WHISPER)]
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
        config_file(tmp_path, "llama", CONFIG), config_file(tmp_path, "whisper", WHISPER), "--dtype", "float16"
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
        report = json.loads(ran(*command, "--tolerance", 1e9, "--json").stdout)
        found = json.loads(ran("inspect", tmp_path / dtype, "--context", 10, "--json").stdout)
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
    found = json.loads(ran("inspect", slim, "--dtype", "float16", "--json").stdout)
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
    text = CONFIG | {"num_key_value_heads": 8}
    files = [
        config_file(tmp_path, name, fields)
        for name, fields in (("llava", {"model_type": "llava", "text_config": text}), ("llama", text))
    ]
    llava, llama = (
        json.loads(ran("inspect", file, "--dtype", "float16", "--context", 100, "--json").stdout) for file in files
    )
    assert llava["slim_refused"] is None
    assert llava["caches"] == llama["caches"]


@needs_weights
def test_bytes_are_those_of_a_dry_run() -> None:
    report = json.loads(
        run("convert-checkpoint", "embedded", "--dtype", "bfloat16", "--plan", "k", "--dry-run", "--json").stdout
    )
    found = json.loads(ran("inspect", "embedded", "--dtype", "bfloat16", "--context", 1, "--json").stdout)
    sizes = {one["cache"]: one["bytes"] for one in found["caches"][0]["sizes"]}
    assert sizes["keys"] == report["bytes_per_token"]
    assert sizes["keys and values"] == report["ordinary_bytes_per_token"]


def test_help_names_the_bound() -> None:
    text = " ".join(run("inspect", "--help").stdout.split())
    for part in ("bounds from sizes", "convert-checkpoint --dry-run", "refuses"):
        assert part in text


@pytest.mark.parametrize(
    ("fields", "attention", "bytes_per_token"),
    [
        ({}, "MHA", 2 * 3 * 8 * 8 * 4),
        ({"num_key_value_heads": 2}, "GQA", 2 * 3 * 2 * 8 * 4),
        ({"num_key_value_heads": 1, "head_dim": 24, "dtype": "bfloat16"}, "MQA", 2 * 3 * 1 * 24 * 2),
    ],
    ids=["mha", "gqa", "mqa-head-dim"],
)
def test_inspect_by_hand(tmp_path, fields, attention, bytes_per_token):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**CONFIG, **fields}))
    options = ["inspect", file, "--context", 100, 1000, "--n", 4, 64, "--new-tokens", 20]
    found = json.loads(ran(*options, "--json").stdout)
    assert (found["attention"], found["bytes_per_token"], found["can_share"]) == (attention, bytes_per_token, True)
    assert [(row["context"], row["samples"]) for row in found["rows"]] == [(100, 4), (100, 64), (1000, 4), (1000, 64)]
    last = found["rows"][-1]
    assert last["kv_bytes"]["stock"] == 64 * 1020 * bytes_per_token
    assert last["kv_bytes"]["shared"] == (1000 + 64 * 20) * bytes_per_token
    assert last["step_bytes"]["ratio"] == pytest.approx(64 * 1010 / (1000 + 64 * 10), abs=1e-4)
    table = ran(*options)
    assert f"KV per token  {bytes_per_token:,} bytes" in table.stdout
    assert "can share     yes" in table.stdout


@needs_weights
def test_inspect_the_embedded_model():
    found = json.loads(ran("inspect", "embedded", "--json").stdout)
    assert (found["attention"], found["can_share"]) == ("MHA", True)
