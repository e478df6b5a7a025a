"""The name of a model, and its config."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import errors

from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.errors import InputError
from hf_fastdecode.model_names import check_model, config_file, load_config, local_folder

RESPONSE = SimpleNamespace(headers={}, request=None)


def test_what_a_name_stands_for(tmp_path: Path):
    assert local_folder("embedded") == MODEL_PATH
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder("org/name") is None
    assert config_file("embedded") == MODEL_PATH / "config.json"
    assert config_file("org/name") is None
    check_model("shape:tiny")
    with pytest.raises(InputError, match="there is no shape 'huge'; choose one of 7b-mha,"):
        check_model("shape:huge")
    for name, message in (
        ("", "a model's name is empty"),
        ("a" * 5000, "cannot be a path .* name a folder or a Hub id"),
    ):
        with pytest.raises(InputError, match=message):
            check_model(name)


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
    with pytest.raises(InputError, match=message) as error:
        load_config(str(file))
    assert "\n" not in str(error.value)


def test_a_config_file_and_its_folder(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gpt2", "n_head": 3, "n_embd": 30}))
    assert load_config(str(file)).num_attention_heads == 3
    assert load_config(str(tmp_path)).num_attention_heads == 3


def test_paths_that_are_not_there(tmp_path: Path):
    with pytest.raises(InputError, match=r"there is no file or folder \./missing; name one"):
        load_config("./missing")
    with pytest.raises(InputError, match=r"config\.json; name a folder saved with save_pretrained"):
        load_config(str(tmp_path))


def test_the_embedded_config_says_what_generate_computes_in():
    assert load_config("embedded").dtype == torch.float32


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (errors.RepositoryNotFoundError("no", response=RESPONSE), "has no model org/name that you can see"),
        (errors.GatedRepoError("no", response=RESPONSE), "org/name is gated"),
        (errors.RemoteEntryNotFoundError("no", response=RESPONSE), "org/name has no config.json"),
        (ConnectionError("no network"), "is not reachable, and org/name is not in its local cache"),
    ],
    ids=["missing", "gated", "no-config", "no-network"],
)
def test_what_the_hub_answers(answer: Exception, message: str, monkeypatch: pytest.MonkeyPatch):
    def raise_answer(*args: object, **kwargs: object) -> None:
        raise answer

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", raise_answer)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", raise_answer)  # of an adapter's config
    with pytest.raises(InputError, match=message):
        load_config("org/name")


def test_no_hub_id():
    with pytest.raises(InputError, match="'two words' is no path, and no Hugging Face Hub id either"):
        load_config("two words")
