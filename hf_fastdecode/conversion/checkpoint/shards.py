"""A checkpoint to write: shards in a folder beside its place, renamed at the end, so that no half of it can be loaded.

The folder holds shards, the state to go on from, and at the very end the config, without which transformers loads
nothing. What was written before an interruption stays, and a resumed conversion goes on to the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .source import CheckpointError

_STATE: Final = "conversion.json"
_METADATA: Final = {"format": "pt"}


def unfinished(target: Path) -> Path:
    """The folder in which a checkpoint is made until it is whole and becomes `target`."""
    return target.with_name(f".{target.name}.converting")


class ShardWriter:
    """Writes groups of tensors, in order, to shards of at most a size where groups allow.

    Args:
        target: Folder of the checkpoint that is made; there must be none.
        limit: Most bytes in a shard; a shard begins with a group, so that a conversion can be resumed there.
        settings: What the conversion is of, to tell it from another one.
        resume: Go on with what an interrupted conversion left, if it left anything.

    Raises:
        CheckpointError: The target exists; another process writes it now; or an interrupted conversion is there and
            not to be resumed, of other settings, or not as it was left.
    """

    def __init__(self, target: Path, limit: int, settings: Mapping[str, Any], *, resume: bool = False) -> None:
        if target.exists() or target.is_symlink():
            raise CheckpointError(f"{target} exists; name another folder, or remove it first")
        self.target, self.limit = target, limit
        self.folder = unfinished(target)
        self.state: dict[str, Any] = {
            "settings": json.loads(json.dumps(settings)),
            "groups": 0,
            "shards": [],
            "found": [],
            "carried": [],
        }
        self._pending: dict[str, Tensor] = {}
        self._pending_groups = 0
        self._pending_found: list[Any] = []
        self._before: dict[str, Tensor] = {}
        begun = self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        try:
            if begun:
                self._continue(resume)
            else:
                self._save_state({})
        except BaseException:
            self.close()
            raise

    @property
    def groups(self) -> int:
        """Groups that are on disk: the next one to be added."""
        return int(self.state["groups"])

    def carried(self) -> dict[str, Tensor]:
        """State passed to `add` with the first group that is not on disk; empty at the beginning.

        Raises:
            CheckpointError: It is not on disk.
        """
        if not (names := self.state["carried"]):
            return {}
        file = self._carried_file(self.groups)
        try:
            with safe_open(file, "pt") as handle:
                return {name: handle.get_tensor(name) for name in names}
        except (OSError, SafetensorError) as error:
            raise self._incomplete(file) from error

    def add(self, tensors: Mapping[str, Tensor], found: Any, carried: Mapping[str, Tensor]) -> None:
        """Take a group.

        Args:
            tensors: By name.
            found: What is to be told of the group, as JSON has it; comes back from `finish`.
            carried: What the group was computed from, to begin with it again.
        """
        size = sum(map(_nbytes, self._pending.values()))
        if self._pending and size + sum(map(_nbytes, tensors.values())) > self.limit:
            self.flush(carried)
        self._pending |= tensors
        self._pending_groups += 1
        self._pending_found.append(found)

    def flush(self, carried: Mapping[str, Tensor]) -> None:
        """Write what is pending; `carried` belongs to the next group."""
        for part in _parts(self._pending, self.limit):
            file, _ = self._shard_files(len(self.state["shards"]) + 1)
            _save(part, file)
            self.state["shards"].append({name: _nbytes(tensor) for name, tensor in part.items()})
        self.state["groups"] += self._pending_groups
        self.state["found"] += self._pending_found
        self._pending, self._pending_groups, self._pending_found = {}, 0, []
        self._save_state(carried)

    def finish(self) -> list[Any]:
        """Give the shards their names and write their index; gives what was told of each group."""
        self.flush({})
        shards = self.state["shards"]
        places: dict[str, str] = {}
        for number, names in enumerate(shards, 1):
            written, file = self._shard_files(number)
            if written.exists():
                os.replace(written, file)
            places |= dict.fromkeys(names, file.name)
        if len(shards) > 1:
            size = sum(sum(names.values()) for names in shards)
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
            write_json(self.folder / "model.safetensors.index.json", index)
        return list(self.state["found"])

    def publish(self, config: Any) -> None:
        """Write the config, and move the folder to its place.

        Raises:
            CheckpointError: Something has come to be there meanwhile.
        """
        config.save_pretrained(self.folder)
        if self.target.exists():
            raise CheckpointError(
                f"{self.target} has come to be; the conversion is in {self.folder}, move it yourself"
            )
        os.rename(self.folder, self.target)
        (self.target / _STATE).unlink()

    def close(self) -> None:
        """Let other processes resume the conversion."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _continue(self, resume: bool) -> None:
        if not resume:
            raise CheckpointError(f"a conversion was interrupted; --resume continues it, or remove {self.folder}")
        if all(file.suffix == ".partial" for file in self.folder.iterdir()):  # interrupted before its first state
            self._save_state({})
            return
        try:
            state = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            state = None
        if not isinstance(state, dict) or state.pop("sha256", None) != _digest(state):
            raise CheckpointError(f"{self.folder} holds no conversion that could be resumed; remove it")
        if state["settings"] != self.state["settings"]:
            names = sorted(
                name for name, value in self.state["settings"].items() if state["settings"].get(name) != value
            )
            raise CheckpointError(
                f"the interrupted conversion in {self.folder} had another {names[0] if names else 'setting'}; repeat "
                "its command, or remove the folder"
            )
        self.state = state
        for pattern in (".tmp*", "*.partial"):  # files of safetensors and of this module that were being written
            for file in self.folder.glob(pattern):
                file.unlink()
        for number, names in enumerate(state["shards"], 1):
            written, final = self._shard_files(number)
            file = final if final.exists() else written
            try:
                with safe_open(file, "pt") as handle:
                    whole = set(handle.keys()) == set(names)
            except (OSError, SafetensorError):
                whole = False
            if not whole:
                raise self._incomplete(file)

    def _incomplete(self, file: Path) -> CheckpointError:
        return CheckpointError(f"{file} of the interrupted conversion is missing or damaged; remove {self.folder}")

    def _save_state(self, carried: Mapping[str, Tensor]) -> None:
        """Write the state last: until then, what it names was there before."""
        if carried:
            _save(dict(carried), self._carried_file(self.groups))
        self.state["carried"] = sorted(carried)
        write_json(self.folder / _STATE, self.state | {"sha256": _digest(self.state)})
        for file in self.folder.glob("carried-*.safetensors"):
            if file != self._carried_file(self.groups):
                file.unlink()

    def _shard_files(self, number: int) -> tuple[Path, Path]:
        """A shard while there may be more, and under its last name."""
        total = len(self.state["shards"])
        last = "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
        return self.folder / f"shard-{number:05d}.safetensors", self.folder / last

    def _carried_file(self, group: int) -> Path:
        return self.folder / f"carried-{group}.safetensors"


def _lock(folder: Path) -> int | None:
    """Lock a folder for this process, until the file descriptor is closed; None where that is not supported.

    Raises:
        CheckpointError: Another process has locked it.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CheckpointError(f"another process is converting to {folder}; wait until it has ended") from error
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    return descriptor


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    partial = path.with_name(f"{path.name}.partial")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, _METADATA)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    os.replace(partial, path)


def _parts(tensors: dict[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """A group that is larger than a shard in several, each with a tensor at least."""
    parts: list[dict[str, Tensor]] = []
    size = limit + 1
    for name, tensor in tensors.items():
        if size + _nbytes(tensor) > limit:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += _nbytes(tensor)
    return parts


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
