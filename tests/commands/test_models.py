"""Names on the command line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import errors

from hf_fastdecode import configs
from hf_fastdecode.command_errors import CommandError
from hf_fastdecode.commands.models import load_model
from hf_fastdecode.configs import load_config
from hf_fastdecode.devices import pick_device

RESPONSE = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a JSON file"),
        ("[]", "has no field model_type"),
        ('{"hidden_size": 3}', "has no field model_type"),
        ('{"model_type": "nosuch"}', "transformers cannot read the config of .*nosuch"),
        ('{"model_type": "llama", "hidden_size": 65}', "cannot read the config of .*not a multiple"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: str, message: str):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(CommandError, match=message) as error:
        load_config(str(file))
    assert "\n" not in str(error.value)


def test_a_config_file_and_its_folder(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "n_head": 3, "n_embd": 30}))
    assert load_config(str(file)).num_attention_heads == 3
    assert load_config(str(tmp_path)).num_attention_heads == 3


def test_paths_that_are_not_there(tmp_path: Path):
    with pytest.raises(CommandError, match=r"there is no file or folder \./missing; name one"):
        load_config("./missing")
    with pytest.raises(CommandError, match=r"config\.json; name a folder saved with save_pretrained"):
        load_config(str(tmp_path))


def test_the_embedded_config_says_what_generate_computes_in():
    assert load_config("embedded").dtype == torch.float32


def test_no_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(configs, "MODEL_PATH", tmp_path)
    with pytest.raises(CommandError, match="reinstall the package"):
        load_model("embedded", "auto", torch.device("cpu"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (errors.RepositoryNotFoundError("no", response=RESPONSE), "has no model org/name that you can see"),
        (errors.GatedRepoError("no", response=RESPONSE), "org/name is gated"),
        (errors.RemoteEntryNotFoundError("no", response=RESPONSE), "org/name has no config.json"),
        (ConnectionError("no network"), "is not reachable and org/name is not in its local cache"),
    ],
    ids=["missing", "gated", "no-config", "no-network"],
)
def test_what_the_hub_answers(answer: Exception, message: str, monkeypatch: pytest.MonkeyPatch):
    def raise_answer(*args: object, **kwargs: object) -> None:
        raise answer

    monkeypatch.setattr(configs, "get_hf_file_metadata", raise_answer)
    with pytest.raises(CommandError, match=message):
        load_config("org/name")


def test_no_hub_id():
    with pytest.raises(CommandError, match="'two words' is no path, and no Hugging Face Hub id either"):
        load_config("two words")


def test_models_that_do_not_load(tmp_path: Path, checkpoint: Path):
    with pytest.raises(CommandError, match="--dtype must be one of auto, float32, bfloat16, float16, got 'half'"):
        load_model(str(checkpoint), "half", torch.device("cpu"))
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(CommandError, match="cannot load"):
        load_model(str(tmp_path), "auto", torch.device("cpu"))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(CommandError, match="is an encoder-decoder \\(t5\\)"):
        load_model(str(tmp_path), "auto", torch.device("cpu"))


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
        with pytest.raises(CommandError, match=f"'{name}'.*try auto or cpu"):
            pick_device(name)
