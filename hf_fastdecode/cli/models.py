"""From a name on the command line to a model, and the machine in words."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from hf_fastdecode.assets import MODEL_PATH, load_embedded

from ..errors import InputError, one_line, out_of_memory
from ..generation.prompts.prompt_ids import has_no_vocabulary
from ..measurement.shapes import SHAPES, random_model
from ..model_names import EMBEDDED, SHAPE, load_config, local_folder
from .checks import check_dtype
from .completions import vocabulary_of
from .console import note


def load_model(name: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """A decoder-only model in eval mode and its tokenizer, which pads on the left.

    Sampling defaults that come with a checkpoint are dropped, its special tokens kept: what `generate` does is what
    the command line says. Names are those of `load_config`, but not a config.json; or ``shape:`` and one of `SHAPES`:
    random weights, which are as fast as trained ones, and the embedded tokenizer. The dtype ``auto`` is float32 for
    the embedded model, for a shape bfloat16 on a GPU and float32 elsewhere, what the checkpoint says for others.
    """
    check_dtype(dtype)
    if name.startswith(SHAPE):
        return _random_model(name.removeprefix(SHAPE), dtype, device)
    config = load_config(name)
    if config.is_encoder_decoder:
        raise InputError(f"{name} is an encoder-decoder ({config.model_type}); generate takes decoder-only models")
    place = str(local_folder(name) or name)
    try:
        if name == EMBEDDED:
            model, tokenizer = load_embedded(None if dtype == "auto" else getattr(torch, dtype), device)
        else:
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
            if has_no_vocabulary(tokenizer):
                raise InputError(
                    f"{name} has no tokenizer files; save the tokenizer beside the weights (tokenizer.save_pretrained)"
                )
            model = _load_weights(name, place, dtype).to(device).eval()
    except InputError:
        raise
    except SafetensorError as error:
        raise InputError(
            f"cannot load {name}: {_damaged(Path(place))} is cut off or no safetensors file ({one_line(error)}); copy "
            "or download it again"
        ) from error
    except Exception as error:  # files that are not what they say may raise anything
        if out_of_memory(error):
            raise InputError(f"{name} does not fit in the memory of {device}; try --dtype bfloat16") from error
        kind = "" if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: "
        raise InputError(f"cannot load {name}: {kind}{one_line(error)}") from error
    _prepare(model, tokenizer)
    return model, tokenizer


def _random_model(shape: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    chosen = ("bfloat16" if device.type == "cuda" else "float32") if dtype == "auto" else dtype
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    if len(tokenizer) > SHAPES[shape]["vocab_size"]:
        raise InputError(
            f"shape {shape} has {SHAPES[shape]['vocab_size']} tokens, fewer than the {len(tokenizer)} of the embedded "
            "tokenizer; choose another"
        )
    try:
        return random_model(shape, device, getattr(torch, chosen)), tokenizer
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise InputError(f"shape {shape} does not fit in the memory of {device}; name a smaller one") from error


def _load_weights(name: str, place: str, dtype: str) -> Any:
    """The model, if the checkpoint holds all of its weights: transformers would draw the others at random."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its table of the weights that do not fit
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
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
        note(f"{name}: left out {unexpected[0]}{_more(unexpected)}, for which its config has no place")
    return model


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


def machine(device: torch.device) -> str:
    """The processor in words, with the number of threads where torch computes on the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} torch thread{'' if threads == 1 else 's'}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _prepare(model: Any, tokenizer: Any) -> None:
    """Left padding, and a generation config of special tokens only."""
    tokenizer.padding_side = "left"
    given = model.generation_config
    end = given.eos_token_id if given.eos_token_id is not None else tokenizer.eos_token_id
    # Which token pads does not matter, padding is masked; but it must be one of the model's.
    vocabulary = vocabulary_of(model)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= vocabulary:
        first = end[0] if isinstance(end, list) else end
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(first if first is not None and first < vocabulary else 0)
    model.generation_config = GenerationConfig(
        bos_token_id=given.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
