"""Checkpoints that `hf-fastdecode convert-checkpoint` refuses: exit code 2, one line, and nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from hf_fastdecode.assets import MODEL_PATH
from hf_fastdecode.conversion.fit.layer_plan import dtype_name

from ..cases import exhaustive_but
from ..conversion.checkpoints import save_multi_head
from ..patches.encoder_decoder_models import encoder_decoder
from ..patches.family_models import FAMILIES, family_model
from .command_line import ran, refusal

refused = partial(refusal, "convert-checkpoint")
INDEX = "model.safetensors.index.json"


def one_file(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint without its weights, and these."""
    save_multi_head(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
        file.unlink()
    (folder / INDEX).unlink()
    return folder, tensors


def left(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool])
@pytest.mark.parametrize("part", ["mlp.up_proj", "self_attn.k_proj", "embed_tokens", "norm"])
@pytest.mark.parametrize("stored", exhaustive_but(["safetensors"], ["safetensors", "torch"]))
def test_dtypes_without_a_quantization_config(tmp_path: Path, dtype: torch.dtype, part: str, stored: str) -> None:
    folder, tensors = one_file(tmp_path / "source")
    tensors = {name: one.to(dtype) if part in name else one for name, one in tensors.items()}
    if stored == "torch":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    line = refused(folder, tmp_path / "slim")
    assert part in line
    assert f" is of dtype {dtype_name(dtype)}, as quantized weights are" in line
    assert "no quantization; convert the checkpoint that it was made of, in float64, float32" in line
    assert left(tmp_path) == {"source"}


@pytest.mark.parametrize("shape", [(768, 1), (48, 16)], ids=["nf4", "halves"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float4_e2m1fn_x2])
def test_dtypes_of_packed_weights(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Two weights share a byte, so that their shape is not the config's either: quantization explains both."""
    folder, tensors = one_file(tmp_path / "source")
    name = "model.layers.1.mlp.up_proj.weight"
    packed = torch.zeros(shape, dtype=torch.uint8).view(dtype)
    save_file({**tensors, name: packed}, folder / "model.safetensors", {"format": "pt"})
    line = refused(folder, tmp_path / "slim")
    assert f"{name} in {folder} is of dtype {dtype_name(dtype)}, as quantized weights are" in line
    assert left(tmp_path) == {"source"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if "-" not in name])
@pytest.mark.parametrize("command", ["convert-checkpoint", "generate"])
def test_no_tokenizer_files(tmp_path: Path, name: str, command: str) -> None:
    family_model(name).save_pretrained(tmp_path / "source")
    arguments = (tmp_path / "source", tmp_path / "slim") if command == "convert-checkpoint" else ()
    arguments = arguments or ("--model", tmp_path / "source", "--prompt", "def f(x):")
    line = refusal(command, *arguments)
    assert "tokenizer" in line
    assert "save the tokenizer beside the weights" in line or "cannot load" in line
    assert left(tmp_path) == {"source"}


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_no_tokenizer_files_of_models_with_an_encoder(tmp_path: Path, name: str) -> None:
    """transformers makes a T5 tokenizer with a word boundary and 103 special tokens, which finds ids for any text."""
    encoder_decoder(name).save_pretrained(tmp_path / "source")
    assert "has no tokenizer files" in refused(tmp_path / "source", tmp_path / "slim")
    assert left(tmp_path) == {"source"}


@pytest.mark.parametrize("name", exhaustive_but(list(FAMILIES)[::3], FAMILIES))
def test_a_text_is_cut_to_what_the_model_takes(tmp_path: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    family_model(name, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    (tmp_path / "text").write_text("def add(a, b):\n    return a + b\n" * 400)
    ran("convert-checkpoint", tmp_path / "source", "--dry-run", "--calibration", tmp_path / "text", "--json")


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
    ran("convert-checkpoint", folder, tmp_path / "slim")


class Runs:
    """Unpickled, it makes a folder."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


@pytest.mark.parametrize(
    ("written_by", "protocol"),
    [
        (kind, protocol)
        for kind in ("torch", "old torch", "pickle")
        for protocol in range(0 if kind == "pickle" else 2, 6)
    ],
)
def test_a_pickle_that_would_run_code(tmp_path: Path, written_by: str, protocol: int) -> None:
    """In every protocol: later ones put names on the stack, where torch's safe loader does not look for them."""
    folder, tensors = one_file(tmp_path / "source")
    weights = folder / "pytorch_model.bin"
    content: dict[str, Any] = {**tensors, "x": Runs(os.mkdir, str(tmp_path / "ran"))}
    if written_by == "pickle":
        weights.write_bytes(pickle.dumps({"x": content["x"]}, protocol))
    else:
        zipped = written_by == "torch"
        torch.save(content, weights, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    line = refused(folder, tmp_path / "slim")
    assert f"torch's safe loader refuses {weights}: it is cut off or damaged, would run code" in line
    assert left(tmp_path) == {"source"}


def test_a_torchscript_archive(tmp_path: Path) -> None:
    """It holds code beside weights."""
    folder, _ = one_file(tmp_path / "source")
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/constants.pkl", pickle.dumps((), 2))
        archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
        archive.writestr("archive/version", "3")
    line = refused(folder, tmp_path / "slim")
    assert "pytorch_model.bin is a TorchScript archive, whose code was not loaded; take weights in safetensors" in line
    assert left(tmp_path) == {"source"}


@pytest.mark.parametrize("zipped", [True, False])
def test_weights_in_a_protocol_that_is_not_read(tmp_path: Path, zipped: bool) -> None:
    """They would run no code, and are whole."""
    folder, tensors = one_file(tmp_path / "source")
    weights = folder / "pytorch_model.bin"
    torch.save(tensors, weights, pickle_protocol=4, _use_new_zipfile_serialization=zipped)
    line = refused(folder, tmp_path / "slim")
    assert f"torch's safe loader refuses {weights}: " in line and "another protocol than torch.save's" in line
    assert left(tmp_path) == {"source"}


@pytest.mark.parametrize("content", [b"no pickle", b"", b"PK and no archive"], ids=repr)
def test_what_is_no_pickle_is_damaged(tmp_path: Path, content: bytes) -> None:
    folder, _ = one_file(tmp_path / "source")
    (folder / "pytorch_model.bin").write_bytes(content)
    line = refused(folder, tmp_path / "slim")
    assert "cut off or damaged" in line and "pytorch_model.bin" in line


def test_torch_files_that_hold_other_things(tmp_path: Path) -> None:
    folder, tensors = one_file(tmp_path / "source")
    weights, name = folder / "pytorch_model.bin", "model.layers.1.mlp.up_proj.weight"
    for content, words in (
        ([1, 2], f"{weights} holds a list, not tensors by their names"),
        ({**tensors, name: tensors[name].to_sparse()}, f"{name} in {weights} is stored as torch.sparse_coo"),
    ):
        torch.save(content, weights)
        assert words in refused(folder, tmp_path / "slim")
        assert left(tmp_path) == {"source"}
    torch.save({**tensors, "epoch": 3, "optimizer": {"lr": 0.1}}, weights)
    ran("convert-checkpoint", folder, tmp_path / "slim")
