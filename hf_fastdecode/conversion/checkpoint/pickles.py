"""Read tensors from files of `torch.save` without running code, and name what a refused file would run.

torch's safe loader allows the few globals that tensors need, in pickle's protocol 2, and does not always name a global
that it refuses: later protocols put names on the stack. So a refused file is scanned again, without executing it.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

import torch
from torch import Tensor

from hf_fastdecode._compat import safe_globals

_NAMED: Final = re.compile(r"GLOBAL (\S+)")  # in errors of torch's safe loader
_NAME: Final = re.compile(r"[A-Za-z_][\w.]*")
_MOST_PICKLES: Final = 5  # in a row, in files of old versions: number, protocol, system, tensors, keys


class PickleError(ValueError):
    """A file that was not loaded."""


def load_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, memory-mapped unless it has an old format; other entries are left out.

    Raises PickleError where loading it would run code, or it holds something else; torch raises anything on damage.
    """
    is_zip = _is_zip(file)
    if is_zip and _is_torchscript(file):
        raise PickleError(f"{file} is a TorchScript archive, whose code was not loaded; take weights in safetensors")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about protocols, beside the error
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        named = _NAMED.search(str(error))
        protocol, unknown = (0, named[1]) if named else _look_through(file, is_zip)
        if unknown is not None:
            raise PickleError(
                f"{file} is a pickle that would run code: it names {unknown}, and was not loaded; take weights in "
                "safetensors, or from a source you trust"
            ) from error
        if protocol > 2:
            raise PickleError(
                f"{file} is in pickle protocol {protocol}, of which torch's safe loader reads 2; take weights in "
                "safetensors, or save them again as torch.save does by default"
            ) from error
        raise
    if not isinstance(content, Mapping):
        raise PickleError(
            f"{file} holds a {type(content).__name__}, not tensors by their names; save the model's state_dict()"
        )
    tensors = {str(name): one for name, one in content.items() if isinstance(one, Tensor)}
    for name, one in tensors.items():
        if one.layout is not torch.strided:
            raise PickleError(f"{name} in {file} is stored as {one.layout}; save it dense (to_dense())")
    return tensors


def _look_through(file: Path, is_zip: bool) -> tuple[int, str | None]:
    """The pickle protocol of a refused file, 0 for other formats, and the first global that tensors do not need."""
    protocol, known = 0, safe_globals()
    try:
        with _pickled(file) if is_zip else file.open("rb") as stream:
            for found in _instructions(stream):
                if isinstance(found, int):
                    protocol = max(protocol, found)
                elif found not in known:
                    return protocol, found
    except (ValueError, IndexError, OSError):  # such as the data behind the pickles of old files
        pass
    return protocol, None


def _is_zip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(2) == b"PK"


def _pickled(file: Path) -> IO[bytes]:
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return io.BytesIO(archive.read(names[0]))


def _is_torchscript(file: Path) -> bool:
    with zipfile.ZipFile(file) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _instructions(stream: IO[bytes]) -> Iterator[int | str]:
    """Protocols, and names of globals such as ``os.system``, of the pickles in a stream; nothing is executed."""
    for _ in range(_MOST_PICKLES):
        texts: list[str] = []
        memo: dict[int, str] = {}
        top = ""
        for operation, argument, _ in pickletools.genops(stream):
            kind = operation.name
            if kind == "PROTO":
                yield int(str(argument))
            elif kind in ("GLOBAL", "INST", "STACK_GLOBAL"):
                parts = texts[-2:] if kind == "STACK_GLOBAL" else str(argument).split(" ")
                if len(parts) == 2 and all(map(_NAME.fullmatch, parts)):
                    yield ".".join(parts)
            if kind in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
                memo[len(memo) if argument is None else argument] = top
                continue
            if kind in ("GET", "BINGET", "LONG_BINGET"):
                top = memo.get(int(str(argument)), "")
            else:
                top = argument if isinstance(argument, str) else ""
            texts.append(top)
