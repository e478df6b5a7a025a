"""Every model that transformers loads, on the command line, and those that cannot be loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
)

from hf_fastdecode import model_loading, model_names
from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.cli.console import quiet_libraries
from hf_fastdecode.cli.models import load_model, run_generate
from hf_fastdecode.cli.options import Sampling, pick_device
from hf_fastdecode.errors import InputError

from .command_line import PROMPT, ran, refusal, run


def test_no_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_names, "MODEL_PATH", tmp_path)
    with pytest.raises(InputError, match="reinstall the package"):
        load_model("embedded", "auto", torch.device("cpu"))


def test_models_that_do_not_load(tmp_path: Path, checkpoint: Path):
    with pytest.raises(InputError, match=r"`dtype` must be one of auto, float32 \(fp32\), .* got 'half'"):
        load_model(str(checkpoint), "half", torch.device("cpu"))
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(InputError, match="cannot load"):
        load_model(str(tmp_path), "auto", torch.device("cpu"))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(InputError, match="is an encoder-decoder \\(t5\\)"):
        load_model(str(tmp_path), "auto", torch.device("cpu"))


def broken(checkpoint: Path, folder: Path, config: dict, change: Callable[[dict], None]) -> str:
    """A copy of the checkpoint with other fields in its config, and weights that were changed."""
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("config", "lost", "message"),
    [
        ({"hidden_size": 64, "head_dim": 16}, (), r"wants lm_head.weight of shape \[\d+, 64\], .* holds \[\d+, 32\]"),
        ({"num_hidden_layers": 3}, (), r"lacks model.layers.2.input_layernorm.weight \(and 8 more like it\)"),
        ({}, ("model.norm.weight",), r"lacks model.norm.weight, which its config wants"),
    ],
    ids=["shapes", "layers", "missing"],
)
def test_weights_that_are_not_those_of_the_config(checkpoint, tmp_path, config, lost, message, capfd):
    name = broken(checkpoint, tmp_path, config, lambda weights: [weights.pop(key) for key in lost])
    with quiet_libraries(warnings=True), pytest.raises(InputError, match=message):
        load_model(name, "auto", torch.device("cpu"))
    assert capfd.readouterr().err == "", "transformers has a table"


def test_weights_that_the_config_has_no_place_for_are_told(checkpoint, tmp_path, capsys):
    name = broken(checkpoint, tmp_path, {"num_hidden_layers": 1}, lambda weights: None)
    with quiet_libraries(warnings=True):
        assert load_model(name, "auto", torch.device("cpu"))[0].config.num_hidden_layers == 1
    told = capsys.readouterr().err
    assert "left out model.layers.1.input_layernorm.weight (and 8 more like it)" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("length", [0, 30, 3001])
def test_a_file_that_is_cut_off(checkpoint, tmp_path, length):
    name = broken(checkpoint, tmp_path, {}, lambda weights: None)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(InputError, match=r"model\.safetensors is cut off or no safetensors file .* copy"):
        load_model(name, "auto", torch.device("cpu"))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(checkpoint, tmp_path, value, greedy):
    name = broken(checkpoint, tmp_path, {}, lambda weights: weights["lm_head.weight"][3].fill_(value))
    model, tokenizer = load_model(name, "auto", torch.device("cpu"))
    for options in ({}, None):
        with pytest.raises(InputError, match=r"logits are not finite: its weight lm_head\.weight holds NaN"):
            run_generate(
                model, tokenizer, ["a b " * 50], Sampling(n=1 if greedy else 3, greedy=greedy), options=options
            )


def test_a_tokenizer_of_another_model(checkpoint, tmp_path):
    def cut(weights: dict) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:50].clone()

    model, tokenizer = load_model(broken(checkpoint, tmp_path, {"vocab_size": 50}, cut), "auto", torch.device("cpu"))
    with pytest.raises(InputError, match=r"prompt 0 has token \d+, and the model knows tokens 0 to 49;"):
        run_generate(model, tokenizer, ["def add(a, b):"], Sampling(n=2))


def test_padding_that_the_model_does_not_know(checkpoint, tmp_path):
    name = broken(checkpoint, tmp_path, {}, lambda weights: None)
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.add_special_tokens({"pad_token": "<another>"})
    tokenizer.save_pretrained(name)
    model, tokenizer = load_model(name, "auto", torch.device("cpu"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    found = run_generate(model, tokenizer, ["a b", "def add(a, b):"], Sampling(n=2, max_new_tokens=2))
    assert len(found.completions) == 4


def test_a_tokenizer_without_padding(checkpoint: Path, tmp_path: Path):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model, tokenizer = load_model(str(tmp_path), "bfloat16", torch.device("cpu"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.generation_config.pad_token_id
    assert tokenizer.padding_side == "left"
    assert (model.dtype, model.training) == (torch.bfloat16, False)


def test_devices():
    assert pick_device("auto").type in ("cpu", "cuda")
    assert pick_device("cpu") == torch.device("cpu")
    for name in ("nonsense", "cuda:77", "meta"):
        with pytest.raises(InputError, match=f"'{name}'.*try auto or cpu"):
            pick_device(name)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
NEW = ("--n", 4, "--max-new-tokens", 3)


def save_multimodal(model_type: str, folder: Path) -> Path:
    """A tiny model of text and images."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    text = {**SMALL, "head_dim": 8, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    if model_type == "mistral3":
        text |= {"model_type": "mistral"}
        vision = {**SMALL, "model_type": "pixtral", "image_size": 28, "patch_size": 14}
    else:
        text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
        vision = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 32}
        vision |= {"deepstack_visual_indexes": [0]}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(tmp_path: Path, checkpoint: Path) -> Path:
    """The folder of an adapter without a tokenizer, as far as its config goes."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(checkpoint)}))
    return tmp_path


@pytest.mark.parametrize("model_type", ["mistral3", "qwen3_vl"])
def test_text_of_multimodal_models(model_type, tmp_path):
    folder = save_multimodal(model_type, tmp_path)
    done = ran("generate", "--model", folder, "--prompt", PROMPT, *NEW, "--explain")
    assert "4 completions, 12 tokens" in done.stderr
    assert "; shared (" in done.stderr
    assert "can share     yes" in run("inspect", folder, "--context", 64, "--n", 4, "--batch", 1).stdout


def test_encoder_decoders_complete_what_they_encode(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    torch.manual_seed(0)
    config = T5Config(
        **{"vocab_size": len(tokenizer), "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # Of two lengths, so that one is padded.
    ours = ran("generate", "--model", tmp_path, "--prompt", PROMPT, "--prompt", "a b", "--greedy", "--json")
    found = [json.loads(line) for line in ours.stdout.splitlines()]
    for text, one in zip((PROMPT, "a b"), found, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        stock = model.generate(ids, max_new_tokens=128, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        assert one["text"] == tokenizer.decode(stock[0, 1:], skip_special_tokens=True)
    message = refusal("eval", "generate", "--model", tmp_path, "--limit", 1, "--n", 1, "--out", tmp_path / "run")
    assert "is an encoder-decoder (t5), and this command takes decoder-only models" in message


def test_speech_is_no_text(tmp_path):
    WhisperConfig(**{"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}).save_pretrained(tmp_path)
    assert "(whisper) is given audio" in refusal("generate", "--model", tmp_path, "--prompt", "x")


def test_an_adapter_is_counted_as_its_model(adapter, checkpoint):
    words = ("--context", 64, "--n", 4, "--batch", 1, "--json")
    ours, base = (json.loads(ran("inspect", folder, *words).stdout) for folder in (adapter, checkpoint))
    assert ours | {"model": base["model"]} == base


@pytest.mark.parametrize("command", ["generate --prompt x --model", "eval generate --limit 1 --n 1 --model"])
def test_an_adapter_without_peft(command, adapter, checkpoint, monkeypatch):
    monkeypatch.setattr(model_loading, "find_spec", lambda name: None)
    assert f"is an adapter of {checkpoint}, which needs PEFT; pip install peft" in refusal(*command.split(), adapter)


def test_an_adapter_is_not_converted(adapter, tmp_path):
    assert "merge it into that model first" in refusal("convert-checkpoint", adapter, tmp_path / "slim")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "must name a model as base_model_name_or_path, got None; write its name there"),
        ({"base_model_name_or_path": "./nosuch"}, "is an adapter of ./nosuch: there is no file or folder ./nosuch"),
        ({"base_model_name_or_path": "."}, "is an adapter too; merge that one into its model"),
        ("{", "is not a JSON file"),
    ],
)
@pytest.mark.parametrize("command", ["generate --prompt x --model", "inspect"])
def test_adapters_without_a_model(command, content, message, adapter, monkeypatch):
    monkeypatch.chdir(adapter)
    text = content if isinstance(content, str) else json.dumps(content)
    (adapter / "adapter_config.json").write_text(text)
    assert message in refusal(*command.split(), adapter)


def test_a_tokenizer_of_python(tmp_path):
    tokenizer = ByT5Tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        **SMALL, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, max_position_embeddings=8192
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    words = ("--model", tmp_path, "--limit", 1, "--n", 2, "--max-new-tokens", 8, "--out", tmp_path / "run")
    ran("eval", "generate", *words)
    again = run("eval", "generate", *words)
    assert "0 samples drawn" in again.stderr, "the same tokenizer has the same digest"
    ran("generate", "--model", tmp_path, "--prompt", "é b", "--n", 2, "--max-new-tokens", 4)


@pytest.mark.parametrize(
    ("spelling", "name"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("float16", "float16")]
)
def test_both_spellings_of_a_dtype(spelling, name, checkpoint):
    words = ("--model", checkpoint, "--prompt", "a b", "--n", 1, "--max-new-tokens", 1)
    assert f"; {name}, " in run("generate", *words, "--dtype", spelling).stderr
    shown = json.loads(ran("inspect", checkpoint, "--context", 8, "--n", 2, "--dtype", spelling, "--json").stdout)
    assert shown["dtype"] == name
