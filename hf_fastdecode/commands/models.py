"""From a name on the command line to a config, a model and a device."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hf_fastdecode.assets import MODEL_PATH, load_embedded

from ..command_errors import CommandError, one_line

EMBEDDED: Final = "embedded"
DTYPES: Final = ("float32", "bfloat16", "float16")
_HUB_TIMEOUT: Final = 10.0  # seconds


def load_config(name: str) -> Any:
    """The transformers config of a model, with the dtype that `load_model` gives it; no weights are read.

    Args:
        name: ``embedded``, a config.json, a model's folder, or an id on the Hugging Face Hub.

    Raises:
        CommandError: There is no such model, it cannot be reached, or its config is not one that transformers knows.
    """
    path = MODEL_PATH if name == EMBEDDED else Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            remedy = "reinstall the package" if name == EMBEDDED else "name a folder saved with save_pretrained"
            raise CommandError(f"there is no {path}; {remedy}")
    if path.is_file():
        _check_json(path)
        config = _read_config(str(path), name)
        if name == EMBEDDED:
            config.dtype = torch.float32
        return config
    if name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1:
        raise CommandError(f"there is no file or folder {name}; name one, a Hugging Face Hub id, or {EMBEDDED!r}")
    return _read_config(name, name, local_files_only=not _hub_has(name))


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
        raise CommandError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}")
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


def max_positions(config: Any) -> int | None:
    """Most tokens in a row, or None when the config sets no bound."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


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


def _check_json(path: Path) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} is not a JSON file ({one_line(error)}); name a model's config.json") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise CommandError(f"{path} has no field model_type; name a transformers model's config.json")


def _read_config(place: str, name: str, **options: Any) -> Any:
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False, **options)
    except Exception as error:  # a config class may raise anything on fields that it does not expect
        if options.get("local_files_only"):
            raise CommandError(
                f"the Hugging Face Hub is not reachable and {name} is not in its local cache; check the network, "
                f"name a local folder, or use {EMBEDDED!r}"
            ) from error
        raise CommandError(f"transformers cannot read the config of {name}: {one_line(error)}") from error


def _hub_has(name: str) -> bool:
    """Whether the Hub answers and has the model's config; False when it does not answer.

    Asked before transformers asks, which retries for half a minute when there is no network.
    """
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT)
    except HFValidationError as error:
        raise CommandError(f"{name!r} is no path, and no Hugging Face Hub id either: {one_line(error)}") from error
    except GatedRepoError as error:
        raise CommandError(f"{name} is gated; accept its terms on the Hub and log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise CommandError(f"the Hugging Face Hub has no model {name} that you can see; check the spelling") from error
    except EntryNotFoundError as error:
        raise CommandError(
            f"{name} has no config.json on the Hugging Face Hub; it is no transformers model"
        ) from error
    except Exception:  # no network, offline mode, a proxy, a server error: transformers may have it in its cache
        return False
    return True


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
