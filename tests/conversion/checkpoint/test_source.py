"""Where checkpoints come from: what is downloaded, and that configs are looked at first."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from hf_fastdecode import model_names
from hf_fastdecode.conversion.checkpoint import find
from hf_fastdecode.conversion.checkpoint.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.checkpoint.find import CheckpointError, find_checkpoint
from hf_fastdecode.conversion.checkpoint.source import Checkpoint
from hf_fastdecode.conversion.families import UnconvertibleError
from hf_fastdecode.errors import InputError

from .checkpoints import save_multi_head


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
    monkeypatch.setattr(find, "load_config", load_config)
    return downloads


def test_weights_are_downloaded_after_the_config_was_checked(hub: Path, tmp_path: Path) -> None:
    source = save_multi_head(tmp_path / "hub" / "user" / "model")
    (source / "training_args.bin").write_bytes(b"no weights")
    assert convert_checkpoint(Settings("user/model", None))["model_type"] == "llama"
    found = {file.name for file in (hub / "user" / "model").iterdir()}
    assert found == {file.name for file in source.iterdir()} - {"training_args.bin"}


def test_weights_of_what_is_refused_are_not_downloaded(hub: Path, tmp_path: Path) -> None:
    save_multi_head(tmp_path / "hub" / "user" / "grouped", num_key_value_heads=2)
    with pytest.raises(UnconvertibleError, match="got 2 != 4"):
        convert_checkpoint(Settings("user/grouped", None))
    assert not list((hub / "user" / "grouped").glob("*.safetensors"))
    with pytest.raises(UnconvertibleError, match="not slim"):
        convert_checkpoint(Settings("user/grouped", None, format="full"))


def test_a_refused_folder_needs_no_weights(tmp_path: Path) -> None:
    folder = save_multi_head(tmp_path / "grouped", num_key_value_heads=2)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UnconvertibleError, match="got 2 != 4"):
        convert_checkpoint(Settings(str(folder), None))


def test_weights_in_torch_files(hub: Path, tmp_path: Path) -> None:
    source = tmp_path / "hub" / "user" / "old"
    source.mkdir(parents=True)
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "pytorch_model.bin").write_bytes(b"weights")
    assert (find_checkpoint("user/old") / "pytorch_model.bin").is_file()


def test_no_such_repository(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no folder user/none, the .* Hub is not reachable, .*; name a local folder"):
        find_checkpoint("user/none")


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no config"):
        Checkpoint(tmp_path)
