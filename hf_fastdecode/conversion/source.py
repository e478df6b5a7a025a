"""Find a checkpoint, and read it tensor by tensor, from files of safetensors or of PyTorch, sharded or not.

Files of `torch.save` are read without running code. torch's safe loader allows the few globals that tensors need, in
pickle's protocol 2, and does not always name a global that it refuses: later protocols put names on the stack. So a
refused file is scanned again, without executing it, to name what it would run.
"""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from hf_fastdecode._compat import loaded_name, loading_names, safe_globals

from ..errors import one_line
from ..model_names import EMBEDDED, base_of, load_config, local_folder
from .fit.layer_plan import dtype_name

BESIDE: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of files beside the weights: tokenizers, generation config."""


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
    _download(name, [f"*{suffix}" for suffix in BESIDE])
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


def read_config(folder: Path) -> Any:
    """The config in a folder; CheckpointError where there is none, or transformers cannot read it."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"there is no config.json in {folder}; name a folder saved with save_pretrained")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a config class may raise anything on fields that it does not expect
        raise CheckpointError(f"transformers cannot read {folder}/config.json: {error}") from error


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


REPORT: Final = "slim_report.json"
"""File name of the conversion report, beside the weights."""

_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")
_DTYPES_OF_SAFETENSORS: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
WEIGHT_DTYPES: Final = tuple(_DTYPES_OF_SAFETENSORS.values())
"""Names of the dtypes that weights may be stored in."""
_UNREAD: Final = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Names of buffers in old checkpoints that models no longer read; transformers ignores them silently too."""
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
"""Number of a layer in a tensor's name."""


def _is_report(content: Any) -> bool:
    """Whether a JSON value has the fields that conversions and checks read."""
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, dict) for layer in layers):
        return False
    from_keys = [layer for layer in layers if layer.get("plan") in ("k", "k+r")]
    return all(isinstance(layer.get("value_error"), int | float) for layer in from_keys)


class Checkpoint:
    """A folder with a config and weights, in safetensors or in PyTorch's format, in one file or in shards.

    Tensors are read on demand; PyTorch's files are memory-mapped, unless they have an old format. Raises
    CheckpointError where a file is missing or damaged.

    Attributes:
        tied: Names of tensors that the config's model ties to others, with the others' names; set by `check`.
        left_out: Names of tensors that the config's model neither has nor had in old releases; set by `check`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, read_config(folder)
        self.files = self._files()
        self.stored = {name: name for name in self.files}
        self.tied: dict[str, str] = {}
        self.left_out: list[str] = []
        self._open: tuple[str, Any] | None = None

    def names(self) -> set[str]:
        return set(self.files)

    def rename(self, model_name: Callable[[str], str]) -> None:
        """Rename tensors from the names in files, e.g. of older releases, to those in models."""
        self.stored = {model_name(name): stored for name, stored in self.stored.items()}
        self.files = {model_name(name): file for name, file in self.files.items()}

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
        self.rename(partial(loaded_name, loading_names(model)))
        is_base = self._rename_base(model)
        self.tied = dict(model.all_tied_weights_keys)
        self._swap_tied()
        tied = set(self.tied)
        missing = sorted(
            set(model.state_dict()) - self.names() - tied - set(model._keys_to_ignore_on_load_missing or ())
        )
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            reason = "a file is missing, or config.json is of another model"
            if is_base and not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
                reason = "it is of the base model alone, so save the whole model, with its head"
            raise CheckpointError(f"{self.folder} lacks {missing[0]}{more}, which its config wants; {reason}")
        if surplus := self._surplus_layer(model):
            raise CheckpointError(
                f"{self.folder} holds {surplus}, of a layer that its config lacks; config.json is of another model"
            )
        self._leave_out(model, layers, unread)
        for name, expected in model.state_dict().items():
            if name not in self.files:
                continue
            shape = self.shape(name)
            if expected.is_floating_point() and (dtype := self.stored_dtype(name)) not in WEIGHT_DTYPES:
                raise CheckpointError(
                    f"{name} in {self.folder} is of dtype {dtype}, as quantized weights are, and config.json tells of "
                    f"no quantization; convert the checkpoint that it was made of, in {', '.join(WEIGHT_DTYPES)}"
                )
            if shape != list(expected.shape):
                raise CheckpointError(
                    f"{name} in {self.folder} is of shape {shape}, and its config wants {list(expected.shape)}; "
                    "config.json is of another model"
                )

    def _rename_base(self, model: Any) -> bool:
        """Add or remove the base model's prefix, as transformers does; returns whether names have changed."""
        expected, prefix = set(model.state_dict()), f"{model.base_model_prefix}."

        def model_name(name: str) -> str:
            others = (prefix + name, name.removeprefix(prefix)) if name not in expected else ()
            return next((other for other in others if other in expected and other not in self.files), name)

        before = self.names()
        self.rename(model_name)
        return self.names() != before

    def _leave_out(self, model: Any, layers: str | None, unread: tuple[str, ...]) -> None:
        """Leave out tensors that the model does not have, and refuse them in layers."""
        ignored = [re.compile(one) for one in (*_UNREAD, *(model._keys_to_ignore_on_load_unexpected or ()))]
        for name in sorted(self.names() - set(model.state_dict()) - set(self.tied)):
            if layers is not None and name.startswith(layers):
                if not name.endswith(unread):
                    index, _, own = name.removeprefix(layers).partition(".")
                    raise CheckpointError(
                        f"layer {index} has a tensor {own}, which layers of {self.config.model_type} have not: the "
                        "checkpoint is of another architecture, whose classes come with it"
                    )
            elif not any(one.search(name) for one in ignored):
                self.left_out.append(name)
            del self.files[name], self.stored[name]

    def _swap_tied(self) -> None:
        """Where only the tied copy of a tensor is stored, use it for both, as transformers does."""
        for name, other in self.tied.items():
            if other not in self.files and name in self.files:
                self.files[other], self.stored[other] = self.files.pop(name), self.stored.pop(name)

    def repeats(self, name: str) -> bool:
        """Whether a tensor is tied to another one, and equal to it.

        Where the two differ, e.g. after a head was trained separately, transformers keeps both despite the config.
        """
        other = self.tied.get(name)
        return other in self.files and torch.equal(self.tensor(name), self.tensor(other))

    def unties(self) -> bool:
        """Whether all tensors that the config ties to others are stored and differ from them."""
        return bool(self.tied) and all(name in self.files and not self.repeats(name) for name in self.tied)

    def _surplus_layer(self, model: Any) -> str | None:
        """A tensor of a layer beyond those of the model: its name differs from a known one only in numbers."""
        numberless = {_NUMBER.sub("#", name) for name in model.state_dict()}
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        for name in sorted(self.names() - set(model.state_dict()) - set(model.all_tied_weights_keys)):
            if _NUMBER.sub("#", name) in numberless and not any(re.search(pattern, name) for pattern in ignored):
                return name
        return None

    def shape(self, name: str) -> list[int]:
        handle, stored = self._handle(self.files[name]), self.stored[name]
        try:
            return list(handle[stored].shape if isinstance(handle, Mapping) else handle.get_slice(stored).get_shape())
        except (SafetensorError, KeyError) as error:
            raise CheckpointError(
                f"there is no {stored} in {self.files[name]}, where the index names it; copy or download both again"
            ) from error

    def stored_dtype(self, name: str) -> str:
        """Name of a tensor's dtype, which torch may not have."""
        handle, stored = self._handle(self.files[name]), self.stored[name]
        if isinstance(handle, Mapping):
            return dtype_name(handle[stored].dtype)
        named: str = handle.get_slice(stored).get_dtype()
        if named in _DTYPES_OF_SAFETENSORS:
            return _DTYPES_OF_SAFETENSORS[named]
        try:
            return dtype_name(handle.get_tensor(stored).dtype)
        except SafetensorError:  # a dtype that torch does not have, such as F6_E2M3
            return named

    def tensor(self, name: str) -> Tensor:
        """A tensor, on the CPU, in its own dtype."""
        handle, stored = self._handle(self.files[name]), self.stored[name]
        try:
            return handle[stored] if isinstance(handle, Mapping) else handle.get_tensor(stored)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{self.files[name]} is damaged ({error}); copy or download it again") from error

    def dtype(self, name: str) -> torch.dtype:
        return self.tensor(name).dtype

    def nbytes(self) -> int:
        return sum(file.stat().st_size for file in set(self.files.values()))

    def stamp(self) -> list[list[Any]]:
        """Names, sizes and modification times of the checkpoint's files."""
        files = sorted({*self.files.values(), self.folder / "config.json"})
        return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]

    def copy_beside(self, folder: Path) -> None:
        """Copy the files beside the weights, such as the tokenizer and the generation config, but not the config."""
        for file in sorted(self.folder.iterdir()):
            own = file.name in ("config.json", REPORT) or file.name.endswith(".index.json")
            if file.is_file() and file.suffix in BESIDE and not own:
                shutil.copyfile(file, folder / file.name)

    def report(self) -> dict[str, Any] | None:
        """Report of the conversion that made this checkpoint; None without a readable one."""
        try:
            content = json.loads((self.folder / REPORT).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return content if _is_report(content) else None

    def layer_reports(self, count: int) -> list[dict[str, Any]]:
        """Each layer's entry in the report; empty dictionaries without a report of `count` layers."""
        layers: list[dict[str, Any]] = (self.report() or {"layers": []})["layers"]
        return layers if len(layers) == count else [{} for _ in range(count)]

    def close(self) -> None:
        self._open = None

    def _files(self) -> dict[str, Path]:
        for name in _WEIGHTS:
            whole, index = self.folder / name, self.folder / f"{name}.index.json"
            if whole.is_file():
                handle = self._read(whole)
                return dict.fromkeys(handle.keys(), whole)
            if index.is_file():
                try:
                    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                    files = {tensor: self._inside(index, place) for tensor, place in places.items()}
                except OSError as error:
                    raise _unreadable(index, error) from error
                except CheckpointError:
                    raise
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise CheckpointError(f"{index} is no index of weights; copy or download it again") from error
                if missing := sorted(str(file) for file in set(files.values()) if not file.is_file()):
                    raise CheckpointError(f"there is no {missing[0]}, which {index.name} names; copy or download it")
                return files
        raise CheckpointError(
            f"there are no weights in {self.folder}: {' or '.join(_WEIGHTS)}, or shards with their .index.json; copy "
            "or download what is missing"
        )

    def _inside(self, index: Path, place: str) -> Path:
        """The path of a file that an index names; it must be below the folder, whose links may lead anywhere."""
        path = Path(place)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(
                f"{index} names {place}, which is outside its folder; take the checkpoint from a source you trust"
            )
        return self.folder / path

    def _handle(self, file: Path) -> Any:
        """The opened file; one is open at a time."""
        if self._open is None or self._open[0] != str(file):
            self.close()
            handle = self._read(file)
            self._open = (str(file), handle)
        return self._open[1]

    def _read(self, file: Path) -> Any:
        try:
            file.open("rb").close()
        except OSError as error:  # safe_open raises others
            raise _unreadable(file, error) from error
        try:
            return safe_open(file, "pt") if file.suffix == ".safetensors" else load_tensors(file)
        except PickleError as error:
            raise CheckpointError(str(error)) from error
        except Exception as error:  # a damaged file may raise anything
            raise CheckpointError(
                f"{file} is cut off or damaged ({type(error).__name__}); copy or download it again"
            ) from error


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"cannot read {file}: {error.strerror}; fix that and try again")
