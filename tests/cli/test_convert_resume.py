"""`hf-fastdecode convert-checkpoint --resume` after an interruption: what it continues, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_fastdecode import __version__
from hf_fastdecode.conversion.convert import Settings, convert_checkpoint
from hf_fastdecode.conversion.layer_converter import PlanChoice
from hf_fastdecode.conversion.shards import ShardWriter, _digest

from ..conversion.checkpoints import contents
from .command_line import ran, refusal, run

pytestmark = pytest.mark.usefixtures("undrawn")
RESUME = ("--max-shard-size", 20_000, "--rank", 3, "--resume")
refused = partial(refusal, "convert-checkpoint")


@pytest.fixture
def interrupted(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a conversion that stopped after some layers."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    options = Settings(str(source), tmp_path / "slim", shard_bytes=20_000, choice=PlanChoice(rank=3))
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(options)
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "conversion.json").read_text())["groups"] > 1
    return folder


def edited(**fields: object) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **fields})


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "null",
        lambda text: "[]",
        lambda text: "{}",
        lambda text: '{"settings": 3}',
        lambda text: '{"name": "a conversion of another program", "settings": {}}',
        lambda text: json.dumps({"settings": json.loads(text)["settings"]}),
        edited(groups="two"),
        edited(groups=-1),
        edited(groups=100),
        edited(shards=[["a"]]),
        edited(reports=[None, {}]),
        edited(sha256=3),
    ],
    ids=range(14),
)
def test_odd_states_are_not_resumed(interrupted: Path, source: Path, edit: Callable[[str], str]) -> None:
    """One line, and nothing is changed."""
    state = interrupted / "conversion.json"
    state.write_text(edit(state.read_text()))
    before = contents(interrupted)
    message = refused(source, interrupted.with_name("slim"), *RESUME)
    assert f"{interrupted} holds no conversion that could be resumed; remove it" in message
    assert contents(interrupted) == before


@pytest.mark.parametrize("harm", ["missing", "cut off", "another", "one bit"])
def test_harmed_files_are_not_resumed(interrupted: Path, source: Path, harm: str) -> None:
    file = interrupted / "shard-00001.safetensors"
    if harm == "missing":
        file.unlink()
    elif harm == "cut off":
        file.write_bytes(file.read_bytes()[:100])
    elif harm == "one bit":
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    else:
        save_file({"other": torch.ones(1)}, file)
    message = refused(source, interrupted.with_name("slim"), *RESUME)
    assert f"{file} of the interrupted conversion is missing or damaged; remove {interrupted}" in message


def test_a_harmed_shard_with_its_final_name_is_not_resumed(
    interrupted: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a failed verification, which renames shards before."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "publish", stop)
        assert run("convert-checkpoint", source, interrupted.with_name("slim"), *RESUME).exit_code == 130
    file = next(interrupted.glob("model-00002-of-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    message = refused(source, interrupted.with_name("slim"), *RESUME)
    assert f"{file} of the interrupted conversion is missing or damaged; remove {interrupted}" in message


def test_conversions_of_other_versions_are_not_resumed(interrupted: Path, source: Path) -> None:
    """Their layers may be measured in another way: fp32 once, where now the model's dtype is."""
    file = interrupted / "conversion.json"
    state = json.loads(file.read_text())
    del state["sha256"]
    state["settings"]["version"] = "0.0.9"
    file.write_text(json.dumps({**state, "sha256": _digest(state)}))
    before = contents(interrupted)
    message = refused(source, interrupted.with_name("slim"), *RESUME)
    assert (
        f"{interrupted} had another version of hf-fastdecode, which alone can continue it (this is {__version__})"
        in message
    )
    assert contents(interrupted) == before


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_in_place_of_the_folder(source: Path, tmp_path: Path, kind: str) -> None:
    staging = tmp_path / ".slim.converting"
    if kind == "file":
        staging.write_text("mine")
    else:
        staging.symlink_to("nowhere")
    for options in ((), ("--resume",)):
        message = refused(source, tmp_path / "slim", *options)
        assert message == f"hf-fastdecode: {staging} is no folder, and a conversion needs one; delete or rename it\n"
    assert [one.name for one in tmp_path.iterdir()] == [staging.name]


def test_an_interrupted_conversion_is_resumed(interrupted: Path, source: Path) -> None:
    ran("convert-checkpoint", source, interrupted.with_name("slim"), *RESUME)


def test_an_interruption_tells_how_to_go_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    target, options = tmp_path / "slim", RESUME[:-1]
    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", stop)
        done = run("convert-checkpoint", source, target, *options)
    assert done.exit_code == 130
    folder = tmp_path / ".slim.converting"
    assert done.stderr == f"hf-fastdecode: interrupted; --resume continues from what is converted, in {folder}\n"
    for changed, words in (
        (("--max-shard-size", 30_000, *RESUME[2:]), "another shard size (--max-shard-size)"),
        (("--max-shard-size", 20_000, "--rank", 4, "--resume"), "another rank"),
    ):
        assert f"the interrupted conversion in {folder} had {words}; repeat" in refused(source, target, *changed)
    ran("convert-checkpoint", source, target, *RESUME)


def test_a_running_conversion_is_not_resumed(interrupted: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process would delete files that the first is writing."""
    target, finish, messages = interrupted.with_name("slim"), ShardWriter.finish, []
    written = interrupted / "conversion.json.partial"

    def finish_beside_another(writer: ShardWriter) -> list[Any]:
        written.touch()
        messages.append(refused(source, target, *RESUME))
        assert written.exists()
        return finish(writer)

    monkeypatch.setattr(ShardWriter, "finish", finish_beside_another)
    ran("convert-checkpoint", source, target, *RESUME)
    assert [f"another process is converting to {interrupted}" in message for message in messages] == [True]


@pytest.mark.parametrize("left", [(), ("conversion.json.partial",)], ids=str)
def test_one_interrupted_before_its_first_state_begins(left: tuple[str, ...], source: Path, tmp_path: Path) -> None:
    (tmp_path / ".slim.converting").mkdir()
    for name in left:
        (tmp_path / ".slim.converting" / name).write_text('{"settings"')
    assert "--resume continues it" in refused(source, tmp_path / "slim")
    ran("convert-checkpoint", source, tmp_path / "slim", *RESUME)
    ran("convert-checkpoint", source, tmp_path / "whole", *RESUME[:-1])
    assert contents(tmp_path / "slim") == contents(tmp_path / "whole")


def test_files_that_were_being_written_are_not_published(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a process that was killed."""
    target, folder = tmp_path / "slim", tmp_path / ".slim.converting"

    def killed(self: ShardWriter) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "flush", killed)
        run("convert-checkpoint", source, target, "--plan", "k")
    for name in (".tmp1KVFxu", "shard-00001.safetensors.partial"):
        (folder / name).write_bytes(b"half")
    ran("convert-checkpoint", source, target, "--plan", "k", "--resume")
    assert not [file.name for file in target.iterdir() if file.name.startswith(".tmp") or file.suffix == ".partial"]
