"""Checkpoints that `hf-fastdecode convert-checkpoint` refuses: exit code 2, one line, and nothing left behind."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hf_fastdecode.assets import MODEL_PATH

from ..conversion.checkpoint.checkpoints import save_multi_head
from ..patches.family_models import FAMILIES, family_model
from .command_line import refusal, run

refused = partial(refusal, "convert-checkpoint")
INDEX = "model.safetensors.index.json"


def left(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("part", ["mlp.up_proj", "self_attn.k_proj", "embed_tokens", "norm"])
@pytest.mark.parametrize("stored", ["safetensors", "torch"])
def test_dtypes_without_a_quantization_config(tmp_path: Path, dtype: torch.dtype, part: str, stored: str) -> None:
    folder = save_multi_head(tmp_path / "source")
    tensors = {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}
    tensors = {name: one.to(dtype) if part in name else one for name, one in tensors.items()}
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    if stored == "torch":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    line = refused(folder, tmp_path / "slim")
    assert part in line
    assert " is of dtype " in line
    assert "no quantization; convert the checkpoint that it was made of, in float64, float32" in line
    assert left(tmp_path) == {"source"}


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox", "phi3", "codegen"])
@pytest.mark.parametrize("command", ["convert-checkpoint", "generate"])
def test_no_tokenizer_files(tmp_path: Path, name: str, command: str) -> None:
    family_model(name).save_pretrained(tmp_path / "source")
    arguments = (tmp_path / "source", tmp_path / "slim") if command == "convert-checkpoint" else ()
    arguments = arguments or ("--model", tmp_path / "source", "--prompt", "def f(x):")
    line = refusal(command, *arguments)
    assert "tokenizer" in line
    assert "save the tokenizer beside the weights" in line or "cannot load" in line
    assert left(tmp_path) == {"source"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_is_cut_to_what_the_model_takes(tmp_path: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    family_model(name, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    (tmp_path / "text").write_text("def add(a, b):\n    return a + b\n" * 400)
    done = run("convert-checkpoint", tmp_path / "source", "--dry-run", "--calibration", tmp_path / "text", "--json")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("place", ["../secret", "{folder}/secret", "sub/../../secret"])
def test_an_index_that_names_a_file_outside_its_folder(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_multi_head(tmp_path / "source")
    secret = tmp_path / "secret"
    save_file(load_file(next(folder.glob("*.safetensors"))), secret, {"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = place = place.format(folder=tmp_path)
    (folder / INDEX).write_text(json.dumps(index))
    opened: list[Path] = []
    real = Path.open

    def recording(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", recording)
    line = refused(folder, tmp_path / "slim")
    assert f"{INDEX} names {place}, which is outside its folder; take the checkpoint from a source you trust" in line
    assert not [path for path in opened if path.name == "secret"]
    assert left(tmp_path) == {"source", "secret"}


def test_links_in_the_folder_may_lead_anywhere(tmp_path: Path) -> None:
    """As those of the Hub's cache do."""
    folder = save_multi_head(tmp_path / "source")
    for file in folder.glob("*.safetensors"):
        blob = tmp_path / f"blob-{file.name}"
        file.rename(blob)
        file.symlink_to(blob)
    done = run("convert-checkpoint", folder, tmp_path / "slim")
    assert done.exit_code == 0, done.output


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_code(tmp_path: Path, zipped: bool) -> None:
    folder = save_multi_head(tmp_path / "source")
    tensors: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / INDEX).unlink()
    weights = folder / "pytorch_model.bin"
    tensors["x"] = Runs(os.mkdir, str(tmp_path / "ran"))
    torch.save(tensors, weights, _use_new_zipfile_serialization=zipped)
    line = refused(folder, tmp_path / "slim")
    assert (
        f"{weights} is a pickle that would run code: it names {os.mkdir.__module__}.mkdir, and was not loaded" in line
    )
    assert left(tmp_path) == {"source"}
