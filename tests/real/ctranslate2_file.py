"""Reader of CTranslate2's model files: a list of named tensors."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

_DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)  # by the format's number
_VERSION = 6


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name, on the CPU.

    Raises:
        ValueError: Another version of the format.
    """
    with path.open("rb") as file:
        version, _ = _number(file, "I"), _text(file)
        if version != _VERSION:
            raise ValueError(f"{path} has version {version} of CTranslate2's format, and {_VERSION} is read")
        _number(file, "I")  # revision of the model's specification
        found = {}
        for _ in range(_number(file, "I")):
            name = _text(file)
            shape = [_number(file, "I") for _ in range(_number(file, "B"))]
            dtype = _DTYPES[_number(file, "B")]
            data = np.frombuffer(file.read(_number(file, "I")), dtype)
            found[name] = torch.from_numpy(data.copy()).view(shape)
        return found


def _number(file: BinaryIO, kind: str) -> int:
    (value,) = struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))
    return int(value)


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "H")).rstrip(b"\0").decode()
