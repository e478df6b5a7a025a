"""Models and devices of the command line."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hf_fastdecode import model_names
from hf_fastdecode.cli.checks import pick_device
from hf_fastdecode.cli.completions import run_generate
from hf_fastdecode.cli.console import quiet_libraries
from hf_fastdecode.cli.models import load_model
from hf_fastdecode.cli.sampling import Sampling
from hf_fastdecode.errors import InputError


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
        (
            {"hidden_size": 64, "head_dim": 16},
            (),
            r"wants lm_head.weight of shape \[\d+, 64\], .* holds \[\d+, 32\]",
        ),
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
