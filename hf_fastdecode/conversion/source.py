"""Find a checkpoint, and read it tensor by tensor, from files of safetensors or of PyTorch, sharded or not.

Files of `torch.save` are read without running code.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from hf_fastdecode._compat import loaded_name, loading_names

from ..errors import one_line
from ..model_names import EMBEDDED, base_of, load_config, local_folder
from .fit.layer_plan import dtype_name

REPORT: Final = "slim_report.json"
"""File name of the conversion report, beside the weights."""

WEIGHT_DTYPES: Final = ("float64", "float32", "float16", "bfloat16")
"""Names of the dtypes that weights may be stored in."""

_BESIDE: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # tokenizers, generation config
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")
_UNREAD: Final = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Buffers in old checkpoints that models no longer read; transformers ignores them silently too."""
_LAYER_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_Checked = TypeVar("_Checked")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or converted."""


def find_checkpoint(name: str, check: Callable[[Any], _Checked]) -> tuple[Path, _Checked]:
    """The folder of a checkpoint, the embedded one, a local one or the download of a hub id, and the check's result.

    `check` gets the config before weights are downloaded, and raises to refuse it. Raises CheckpointError where there
    is an adapter alone or cannot be downloaded, InputError where there is none or its config cannot be read.
    """
    config = load_config(name)
    if (base := base_of(name)) is not None:
        raise CheckpointError(
            f"{name} is an adapter of {base}; merge it into that model first, by peft's merge_and_unload, and convert "
            "the folder that save_pretrained writes then"
        )
    checked = check(config)
    if (local := local_folder(name)) is not None:
        return local, checked
    _download(name, [f"*{suffix}" for suffix in _BESIDE])
    folder = _download(name, ["model*.safetensors"])
    if not any(folder.glob("*.safetensors")):
        folder = _download(name, ["pytorch_model*.bin"])
    return folder, checked


def _download(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # no such repository, no network, gated, no valid id
        raise CheckpointError(
            f"the Hugging Face Hub does not give {name} ({one_line(error)}); name a folder, an id on the Hub, or "
            f"{EMBEDDED!r}"
        ) from error


def _load_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, memory-mapped unless it has an old format; other entries are left out.

    Raises CheckpointError where loading it would run code, or it holds something else; torch raises anything on
    damage.
    """
    archive = zipfile.ZipFile(file).namelist() if zipfile.is_zipfile(file) else []
    if any(name.endswith("/constants.pkl") for name in archive):
        raise CheckpointError(
            f"{file} is a TorchScript archive, whose code was not loaded; take weights in safetensors"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about protocols, beside the error
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=bool(archive))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"torch's safe loader refuses {file}: it is cut off or damaged, would run code, or has another protocol "
            "than torch.save's default; download it again, or take weights in safetensors"
        ) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{file} holds a {type(content).__name__}, not tensors by their names; save the model's state_dict()"
        )
    tensors = {str(name): one for name, one in content.items() if isinstance(one, Tensor)}
    for name, one in tensors.items():
        if one.layout is not torch.strided:
            raise CheckpointError(f"{name} in {file} is stored as {one.layout}; save it dense (to_dense())")
    return tensors


class Checkpoint:
    """A folder with a config and weights, in safetensors or in PyTorch's format, in one file or in shards.

    Tensors are read on demand; files are memory-mapped, except PyTorch's old format. Raises InputError where there is
    no config that transformers reads, CheckpointError where a file is missing or damaged. `locations` has the file of
    each tensor and its name there, by its name in the model. `check` finds names of tensors that the model ties to
    others, with those (`tied`), and of tensors that it neither has nor had in old releases (`left_out`).
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, load_config(str(folder))
        self._open: tuple[Path, Any] | None = None
        self.locations = self._find()
        self.tied: dict[str, str] = {}
        self.left_out: list[str] = []

    def rename(self, model_name: Callable[[str], str]) -> None:
        self.locations = {model_name(name): location for name, location in self.locations.items()}

    def check(self, auto: Any, layers: str | None = None, unread: tuple[str, ...] = ()) -> None:
        """Rename tensors as transformers does when it loads, and compare them with a model of the config.

        Tensors that the model does not have are left out, as transformers does. In layers, whose names begin with
        `layers`, they are refused unless they end as `unread`, which old checkpoints hold and models no longer read.
        Raises CheckpointError for these, and where a weight that the config wants is missing, or has another shape or
        dtype.
        """
        try:
            with torch.device("meta"):
                model = auto.from_config(self.config, trust_remote_code=False)
        except Exception as error:  # a model class may raise anything on fields that it does not expect
            raise CheckpointError(
                f"transformers makes no model of {self.folder}/config.json ({type(error).__name__}: {error}); mend it"
            ) from error
        expected, prefix = model.state_dict(), f"{model.base_model_prefix}."
        self.rename(partial(loaded_name, loading_names(model)))
        is_base = self._rename_base(expected, prefix)
        self.tied = dict(model.all_tied_weights_keys)
        for name, other in self.tied.items():  # where only the tied copy is stored, transformers uses it for both
            if other not in self.locations and name in self.locations:
                self.locations[other] = self.locations.pop(name)
        optional = {*self.tied, *(model._keys_to_ignore_on_load_missing or ())}
        if missing := sorted(expected.keys() - self.locations.keys() - optional):
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            reason = "a file is missing, or config.json is of another model"
            if is_base and not any(name.startswith(prefix) for name in missing):
                reason = "it is of the base model alone, so save the whole model, with its head"
            raise CheckpointError(f"{self.folder} lacks {missing[0]}{more}, which its config wants; {reason}")
        self._leave_out(expected, model._keys_to_ignore_on_load_unexpected or (), layers, unread)
        for name, tensor in expected.items():
            if name in self.locations:
                self._check_tensor(name, tensor)

    def _rename_base(self, expected: Mapping[str, Tensor], prefix: str) -> bool:
        """Add or remove the base model's prefix, as transformers does; returns whether names have changed."""
        before = self.locations

        def model_name(name: str) -> str:
            others = (prefix + name, name.removeprefix(prefix)) if name not in expected else ()
            return next((other for other in others if other in expected and other not in before), name)

        self.rename(model_name)
        return self.locations.keys() != before.keys()

    def _leave_out(
        self, expected: Mapping[str, Tensor], ignored: Any, layers: str | None, unread: tuple[str, ...]
    ) -> None:
        """Drop tensors that the model does not have; raise for surplus tensors in layers and for further layers."""
        numberless = {_LAYER_NUMBER.sub("#", name) for name in expected}
        surplus = sorted(self.locations.keys() - expected.keys() - self.tied.keys())
        unknown = [name for name in surplus if not any(re.search(one, name) for one in (*_UNREAD, *ignored))]
        for name in unknown:
            if _LAYER_NUMBER.sub("#", name) in numberless:
                raise CheckpointError(
                    f"{self.folder} holds {name}, of a layer that its config lacks; config.json is of another model"
                )
        for name in surplus:
            if layers is None or not name.startswith(layers):
                self.left_out += [name] if name in unknown else []
            elif not name.endswith(unread):
                index, _, short_name = name.removeprefix(layers).partition(".")
                raise CheckpointError(
                    f"layer {index} has a tensor {short_name}, which layers of {self.config.model_type} have not: the "
                    "checkpoint is of another architecture, whose classes come with it"
                )
            del self.locations[name]

    def _check_tensor(self, name: str, expected: Tensor) -> None:
        stored = self.tensor(name)
        if expected.is_floating_point() and (dtype := dtype_name(stored.dtype)) not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{name} in {self.folder} is of dtype {dtype}, as quantized weights are, and config.json tells of "
                f"no quantization; convert the checkpoint that it was made of, in {', '.join(WEIGHT_DTYPES)}"
            )
        if stored.shape != expected.shape:
            raise CheckpointError(
                f"{name} in {self.folder} is of shape {list(stored.shape)}, and its config wants "
                f"{list(expected.shape)}; config.json is of another model"
            )

    def repeats(self, name: str) -> bool:
        """Whether a tensor is tied to another one, and equal to it.

        Where the two differ, e.g. after a head was trained separately, transformers keeps both despite the config.
        """
        other = self.tied.get(name)
        return other in self.locations and torch.equal(self.tensor(name), self.tensor(other))

    def unties(self) -> bool:
        return bool(self.tied) and all(name in self.locations and not self.repeats(name) for name in self.tied)

    def tensor(self, name: str) -> Tensor:
        """A tensor, on the CPU, in the file's dtype; its elements are read from the disk when they are used."""
        file, stored = self.locations[name]
        handle = self._handle(file)
        if stored not in list(handle.keys()):
            raise CheckpointError(
                f"there is no {stored} in {file}, where the index names it; copy or download both again"
            )
        try:
            return handle[stored] if isinstance(handle, Mapping) else handle.get_tensor(stored)
        except Exception as error:  # damage, or a dtype that torch does not have, such as F6_E2M3
            raise CheckpointError(
                f"cannot read {stored} in {file} ({one_line(error)}); copy or download it again, in "
                f"{', '.join(WEIGHT_DTYPES)}"
            ) from error

    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in {file for file, _ in self.locations.values()})

    def stamp(self) -> list[list[Any]]:
        """Names, sizes and modification times of the checkpoint's files."""
        files = sorted({*(file for file, _ in self.locations.values()), self.folder / "config.json"})
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]

    def copy_beside(self, folder: Path) -> None:
        """Copy the files beside the weights, such as the tokenizer and the generation config, but not the config."""
        for file in sorted(self.folder.iterdir()):
            replaced = file.name in ("config.json", REPORT) or file.name.endswith(".index.json")
            if file.is_file() and file.suffix in _BESIDE and not replaced:
                shutil.copyfile(file, folder / file.name)

    def report(self) -> dict[str, Any] | None:
        """Report of the conversion that made this checkpoint; None without one that has what is read of it."""
        try:
            content: dict[str, Any] = json.loads((self.folder / REPORT).read_text(encoding="utf-8"))
            errors = [layer["value_error"] for layer in content["layers"] if layer.get("plan") in ("k", "k+r")]
        except (AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError):
            return None
        return content if content["layers"] and all(isinstance(one, int | float) for one in errors) else None

    def close(self) -> None:
        self._open = None

    def _find(self) -> dict[str, tuple[Path, str]]:
        for name in _WEIGHTS:
            whole, index = self.folder / name, self.folder / f"{name}.index.json"
            if whole.is_file():
                return {tensor: (whole, tensor) for tensor in list(self._handle(whole).keys())}
            if index.is_file():
                return {tensor: (self.folder / file, tensor) for tensor, file in self._read_index(index).items()}
        raise CheckpointError(
            f"there are no weights in {self.folder}: {' or '.join(_WEIGHTS)}, or shards with their .index.json; copy "
            "or download what is missing"
        )

    def _read_index(self, index: Path) -> dict[str, Path]:
        """The files of an index, which must be below the folder; its links may lead anywhere."""
        try:
            content = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: Path(file) for name, file in content.items()}
        except OSError as error:
            raise _unreadable(index, error) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is no index of weights; copy or download it again") from error
        for file in sorted(set(files.values())):
            if file.is_absolute() or ".." in file.parts:
                raise CheckpointError(
                    f"{index} names {file}, which is outside its folder; take the checkpoint from a source you trust"
                )
            if not (self.folder / file).is_file():
                raise CheckpointError(
                    f"there is no {self.folder / file}, which {index.name} names; copy or download it"
                )
        return files

    def _handle(self, file: Path) -> Any:
        """The opened file; one is open at a time."""
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = file, _read(file)
        return self._open[1]


def _read(file: Path) -> Any:
    try:
        file.open("rb").close()
    except OSError as error:  # safe_open raises others
        raise _unreadable(file, error) from error
    try:
        return safe_open(file, "pt") if file.suffix == ".safetensors" else _load_tensors(file)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise CheckpointError(
            f"{file} is cut off or damaged ({type(error).__name__}); copy or download it again"
        ) from error


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {file}: {error.strerror}; fix that and try again")
