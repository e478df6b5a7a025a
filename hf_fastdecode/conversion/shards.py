"""Write a checkpoint atomically: to a staging folder beside the target, which is renamed at the end.

The staging folder holds shards, a state file for resuming, with the shards' hashes, and at the very end the config,
without which transformers loads nothing. A resumed conversion writes the same bytes as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hf_fastdecode import __version__
from hf_fastdecode.files import exclusive, write_json, write_whole

from .source import CheckpointError

_STATE: Final = "conversion.json"
_METADATA: Final = {"format": "pt"}
_PLAIN: Final = {
    "shard_bytes": "shard size (`max_shard_size`)",
    "files": "source, or its files have changed",
    "version": f"version of hf-fastdecode, which alone can continue it (this is {__version__})",
}
"""Words for settings whose names say too little."""


def unfinished(target: Path) -> Path:
    return target.with_name(f".{target.name}.converting")


class ShardWriter:
    """Writes groups of tensors, in order, to shards of at most `limit` bytes for the new folder `target`.

    A larger tensor is a separate shard. A shard begins with a group, from which a conversion of the same `settings`
    can be resumed. A CheckpointError where the target exists, another process writes it, a file is in place of the
    staging folder, or an interrupted conversion is there that is not to be resumed, is damaged, or had other settings
    or another version of this package.
    """

    def __init__(self, target: Path, limit: int, settings: Mapping[str, Any], *, resume: bool = False) -> None:
        if target.exists() or target.is_symlink():
            raise CheckpointError(f"{target} exists; name another folder, or remove it first")
        self.target, self.limit = target, limit
        self.folder = unfinished(target)
        self.state: dict[str, Any] = {
            "settings": json.loads(json.dumps({"version": __version__, **settings})),
            "groups": 0,
            "shards": [],
            "hashes": [],
            "reports": [],
        }
        self._pending: dict[str, Tensor] = {}
        self._pending_reports: list[Any] = []
        begun = os.path.lexists(self.folder)
        if begun and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is no folder, and a conversion needs one; delete or rename it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._held = ExitStack()
        held = CheckpointError(f"another process is converting to {self.folder}; wait until it has ended")
        self._held.enter_context(exclusive(self.folder, held))
        try:
            if begun:
                self._continue(resume)
            else:
                self._save_state()
        except BaseException:
            self.close()
            raise

    @property
    def groups(self) -> int:
        """Number of groups on disk, and so the index of the next one to be added."""
        return int(self.state["groups"])

    def add(self, tensors: Mapping[str, Tensor], report: Any) -> None:
        """Add a group: its tensors, and plain values for `finish` to return."""
        size = sum(one.nbytes for one in (*self._pending.values(), *tensors.values()))
        if self._pending and size > self.limit:
            self.flush()
        self._pending |= tensors
        self._pending_reports.append(report)

    def flush(self) -> None:
        split = split_torch_state_dict_into_shards(self._pending, max_shard_size=self.limit)
        for names in split.filename_to_tensors.values():
            file, _ = self._shard_files(len(self.state["shards"]) + 1)
            _save({name: self._pending[name] for name in names}, file)
            self.state["shards"].append({name: self._pending[name].nbytes for name in names})
            self.state["hashes"].append(_file_sha256(file))
        self.state["groups"] += len(self._pending_reports)
        self.state["reports"] += self._pending_reports
        self._pending, self._pending_reports = {}, []
        self._save_state()

    def finish(self) -> list[Any]:
        """Give the shards their final names and write the index; returns the report of each group."""
        self.flush()
        shards = self.state["shards"]
        weight_map: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            written, file = self._shard_files(number)
            if written.exists():
                os.replace(written, file)
            weight_map |= dict.fromkeys(names, file.name)
        if len(shards) > 1:
            size = sum(sum(names.values()) for names in shards)
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(self.folder / "model.safetensors.index.json", index)
        return list(self.state["reports"])

    def publish(self, config: Any) -> None:
        """Write the config and rename the staging folder to the target; CheckpointError if it was made meanwhile."""
        config.save_pretrained(self.folder)
        if self.target.exists():
            raise CheckpointError(
                f"{self.target} was created meanwhile; the result is in {self.folder}, move it yourself"
            )
        os.rename(self.folder, self.target)
        (self.target / _STATE).unlink()

    def close(self) -> None:
        self._held.close()

    def _continue(self, resume: bool) -> None:
        if not resume:
            raise CheckpointError(f"a conversion was interrupted; `resume=True` continues it, or remove {self.folder}")
        if all(file.suffix == ".partial" for file in self.folder.iterdir()):  # interrupted before its first state
            self._save_state()
            return
        try:
            state = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            state = None
        if not isinstance(state, dict) or state.pop("sha256", None) != _digest(state):
            raise CheckpointError(f"{self.folder} holds no conversion that could be resumed; remove it")
        if state["settings"] != self.state["settings"]:
            changed = (name for name, one in self.state["settings"].items() if state["settings"].get(name) != one)
            first = min(changed, default="setting")
            other = _PLAIN.get(first, first)
            raise CheckpointError(
                f"the interrupted conversion in {self.folder} had another {other}; repeat its command, or remove the "
                "folder"
            )
        self.state = state
        for pattern in (".tmp*", "*.partial"):  # files of safetensors and of this module that were being written
            for file in self.folder.glob(pattern):
                file.unlink()
        for number, sha256 in enumerate(state["hashes"], 1):
            written, final = self._shard_files(number)
            file = final if final.exists() else written
            if not file.is_file() or _file_sha256(file) != sha256:
                raise CheckpointError(
                    f"{file} of the interrupted conversion is missing or damaged; remove {self.folder}"
                )

    def _save_state(self) -> None:
        write_json(self.folder / _STATE, self.state | {"sha256": _digest(self.state)})

    def _shard_files(self, number: int) -> tuple[Path, Path]:
        """Names of a shard: while more may follow, and the final one."""
        total = len(self.state["shards"])
        last = "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        return self.folder / f"shard-{number:05d}.safetensors", self.folder / last


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        write_whole(path, lambda partial: save_file(contiguous, partial, _METADATA))
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
