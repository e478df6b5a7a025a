"""From a name on the command line to a model, and the machine in words."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_fastdecode.assets import load_embedded

from ..command_errors import CommandError, one_line
from ..configs import EMBEDDED, load_config

DTYPES: Final = ("float32", "bfloat16", "float16")


def load_model(name: str, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """A decoder-only model in eval mode and its tokenizer, which pads on the left.

    Sampling defaults that come with a checkpoint are dropped, its special tokens kept: what `generate` does is what
    the command line says.

    Args:
        name: As for `load_config`, but for a config.json.
        dtype: One of `DTYPES`, or ``auto``: float32 for the embedded model, what the checkpoint says for others.
        device: Where the parameters go.

    Raises:
        CommandError: The model cannot be loaded, or does not generate.
    """
    if dtype not in ("auto", *DTYPES):
        raise CommandError(f"--dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    config = load_config(name)
    if config.is_encoder_decoder:
        raise CommandError(f"{name} is an encoder-decoder ({config.model_type}); generate takes decoder-only models")
    try:
        if name == EMBEDDED:
            model, tokenizer = load_embedded(None if dtype == "auto" else getattr(torch, dtype), device)
        else:
            place = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, trust_remote_code=False)
            model = model.to(device).eval()
    except torch.OutOfMemoryError as error:
        raise CommandError(f"{name} does not fit in the memory of {device}; try --dtype bfloat16", 1) from error
    except (OSError, ValueError, ImportError) as error:
        raise CommandError(f"cannot load {name}: {one_line(error)}") from error
    _prepare(model, tokenizer)
    return model, tokenizer


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
    if tokenizer.pad_token_id is None:
        first = end[0] if isinstance(end, list) else end
        # Which token pads does not matter: padding is masked.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(first if first is not None else 0)
    model.generation_config = GenerationConfig(
        bos_token_id=given.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id
    )
