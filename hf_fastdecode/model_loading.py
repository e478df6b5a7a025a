"""Loads a model by name, with the class of transformers that generates text, and its tokenizer.

A name is one of `model_names.load_config`. Whatever cannot be loaded is an InputError in one line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from .assets import embedded_folder
from .errors import InputError, one_line, out_of_memory
from .model_names import EMBEDDED, base_of, load_config, local_folder

# In the order in which they are asked: a model that only generates text is loaded as one, although its type may be
# known as one of images too.
_DECODERS: Final = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM)
_ENCODER_DECODERS: Final = (AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM, AutoModelForImageTextToText)


def auto_class(config: Any) -> Any:
    """The auto class of transformers that has a model which generates, of this config; ValueError without one."""
    for auto in _ENCODER_DECODERS if config.is_encoder_decoder else _DECODERS:
        if type(config) in auto._model_mapping:
            return auto
    raise ValueError(f"transformers has no model of type {config.model_type!r} that generates text")


def takes_text_only(config: Any) -> bool:
    """Whether a model can be given a text and nothing else: an encoder of speech cannot."""
    return auto_class(config) is not AutoModelForSpeechSeq2Seq


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model; of an adapter the saved one, or its base's where it was saved without."""
    base = base_of(name)
    with _loading(name):
        try:
            tokenizer = AutoTokenizer.from_pretrained(_source(name), trust_remote_code=False)
        except Exception:
            if base is None:
                raise
            tokenizer = None
        if tokenizer is not None and not has_no_vocabulary(tokenizer):
            return tokenizer
    if base is not None:
        return load_tokenizer(base)
    raise InputError(
        f"{name} has no tokenizer files; save the tokenizer beside the weights (tokenizer.save_pretrained)"
    )


def load_weights(name: str, dtype: str | torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model on the device, in eval mode, with all of its weights and, of an adapter, the adapter in it.

    Args:
        name: As for `load_config`.
        dtype: ``auto`` is what the checkpoint says, for the embedded model float32.
        device: Quantized weights are made there, others are moved there.

    Raises:
        InputError: The weights are not those of the config, cannot be read, or do not fit into memory.
    """
    config = load_config(name)
    if dtype == "auto" and name == EMBEDDED:
        dtype = config.dtype
    base = base_of(name)
    if base is not None:
        check_peft(name, base)
    with _loading(name, device):
        model = _checked_weights(name if base is None else base, config, dtype, device)
        if base is not None:
            with _quiet():
                model.load_adapter(_source(name))
    return model.eval()


def check_peft(name: str, base: str) -> None:
    """Refuse an adapter of a base model without the package that puts it there."""
    if find_spec("peft") is None:
        raise InputError(f"{name} is an adapter of {base}, which needs PEFT; pip install peft")


def _checked_weights(name: str, config: Any, dtype: str | torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model, if the checkpoint holds all of its weights: transformers would draw the others at random."""
    quantized = getattr(config, "quantization_config", None) is not None
    with _quiet():
        model, found = auto_class(config).from_pretrained(
            _source(name),
            dtype=getattr(torch, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype,
            device_map={"": device} if quantized else None,  # they may not be moved once they are made
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    if mismatched := sorted(found["mismatched_keys"]):
        weight, stored, expected = mismatched[0]
        raise InputError(
            f"cannot load {name}: its config wants {weight} of shape {list(expected)}, the checkpoint holds "
            f"{list(stored)}{_more(mismatched)}; config.json and weights are of different models"
        )
    if missing := sorted(found["missing_keys"]):
        raise InputError(
            f"cannot load {name}: the checkpoint lacks {missing[0]}{_more(missing)}, which its config wants; "
            "config.json and weights are of different models, or a file is missing"
        )
    if unexpected := sorted(found["unexpected_keys"]):
        left_out = f"{name}: left out {unexpected[0]}{_more(unexpected)}, for which its config has no place"
        print(left_out, file=sys.stderr)
    return model if quantized else model.to(device)


@contextmanager
def _loading(name: str, device: torch.device | None = None) -> Iterator[None]:
    """Context in which errors become InputErrors: damaged files may raise anything."""
    try:
        yield
    except InputError:
        raise
    except SafetensorError as error:
        raise InputError(
            f"cannot load {name}: {_damaged(Path(_source(name)))} is cut off or no safetensors file "
            f"({one_line(error)}); copy or download it again"
        ) from error
    except Exception as error:
        if out_of_memory(error):
            raise InputError(f'{name} does not fit in the memory of {device}; try `dtype="bfloat16"`') from error
        kind = "" if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: "
        raise InputError(f"cannot load {name}: {kind}{one_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Within, transformers does not show its table of the weights that do not fit."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)


def _source(name: str) -> str:
    return str(embedded_folder() if name == EMBEDDED else local_folder(name) or name)


def _more(names: Sequence[Any]) -> str:
    return f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""


def _damaged(folder: Path) -> Path:
    """The first file of weights that cannot be read, or the folder."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError:
            return file
    return folder


def has_no_vocabulary(tokenizer: Any) -> bool:
    """Whether a tokenizer has no letters but in special tokens, as transformers makes one of a folder without files.

    Besides special tokens, an empty one of T5 has a word boundary, so that it finds ids for any text.
    """
    words = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    return not any(any(map(str.isalnum, word)) for word in words)
