"""The embedded model and the embedded tasks: what runs without a download."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..dtypes import FLOATS, torch_dtype

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = [
    "BEGIN",
    "DONE",
    "MODEL_PATH",
    "SEPARATOR",
    "Task",
    "embedded_folder",
    "embedded_tasks",
    "few_shot_prompt",
    "fewshot_tasks",
    "load_embedded",
    "solved_example",
    "task_prompt",
]

Task = dict[str, Any]

BEGIN: Final = "[BEGIN]"  # one token of the embedded tokenizer
DONE: Final = "[DONE]"  # the embedded tokenizer's eos token
SEPARATOR: Final = "\n\n"  # between the examples of a prompt

_HERE: Final = Path(__file__).parent
MODEL_PATH: Final = _HERE / "model"
"""The embedded model as it is installed; nothing is written there."""


def embedded_folder() -> Path:
    """A copy of the embedded model's folder, for programs that load a model by its path and may write beside it.

    Returns:
        A folder of the Hugging Face cache (``HF_HOME``), made at the first call; one of this process where that cannot
        be read or written to.

    Raises:
        FileNotFoundError: The installation lacks the weights.
    """
    from huggingface_hub.constants import HF_HOME

    weights = MODEL_PATH / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(
            f"no weights at {MODEL_PATH}; reinstall the package with its data files, "
            "or train them in a clone of the repository with python -m tools.embedded_model.train"
        )
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(MODEL_PATH.iterdir()) if file.is_file()))
    place = Path(HF_HOME, "hf_fastdecode", f"embedded-{digest.hexdigest()[:12]}")
    if place.is_dir():
        return place if os.access(place, os.R_OK | os.W_OK | os.X_OK) else _temporary_copy()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        whole = _copy(Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent)))
    except OSError:
        return _temporary_copy()
    try:
        whole.rename(place)
    except OSError:  # another process was first
        shutil.rmtree(whole)
    return place


@lru_cache
def _temporary_copy() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hf_fastdecode-embedded-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _copy(folder)


def _copy(folder: Path) -> Path:
    for file in MODEL_PATH.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)  # without its mode, which may be read-only
    return folder


def load_embedded(
    dtype: str | torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Load the embedded Llama model (multi-head attention, RoPE, head_dim 64) and its tokenizer, of `embedded_folder`.

    Args:
        dtype: of the parameters, by name (``"float16"``, ``"fp16"``) or as torch's; None means torch.float32 (the file
            stores float16).
        device: where the parameters go.

    Returns:
        The model in eval mode and its tokenizer (left padding, eos ``[DONE]``).

    Raises:
        FileNotFoundError: the installation lacks the weights.
        ValueError: `dtype` is not float32, bfloat16, float16 or float64.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    held = torch_dtype("float32" if dtype is None else dtype, (*FLOATS, "float64"))
    folder = embedded_folder()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=held)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def embedded_tasks() -> list[Task]:
    """The held-out tasks, in MBPP's schema; the model saw none of their compositions in training."""
    return [dict(task) for task in _read("tasks.jsonl")]


def fewshot_tasks() -> list[Task]:
    """The tasks that few-shot prompts are built from, in MBPP's schema; they come from the training distribution."""
    return [dict(task) for task in _read("fewshot.jsonl")]


def few_shot_prompt(task: Task, shots: int | Sequence[Task] = 3) -> str:
    """The prompt for a task: solved examples, then the task up to where its completion starts.

    Args:
        task: fields ``text`` and ``test_list`` are read.
        shots: the solved tasks to show, or how many of `fewshot_tasks` (each about 150 tokens; the model was
            trained on contexts of 2048 tokens, about 12 examples).

    Raises:
        ValueError: `shots` is negative or more than there are few-shot tasks.
    """
    if isinstance(shots, int):
        available = _read("fewshot.jsonl")
        if not 0 <= shots <= len(available):
            raise ValueError(
                f"shots must be between 0 and {len(available)}, got {shots}; pass your own tasks for more"
            )
        shots = available[:shots]
    examples = [solved_example(shot["text"], shot["test_list"], shot["code"]) for shot in shots]
    return SEPARATOR.join([*examples, task_prompt(task["text"], task["test_list"])])


def task_prompt(text: str, tests: Sequence[str]) -> str:
    """A task up to the point where the completion starts: MBPP's prompt (Austin et al. 2021, section 3.1)."""
    return (
        f"You are an expert Python programmer, and here is your task: {text} "
        "Your code should pass these tests:\n\n" + "\n".join(tests) + f"\n{BEGIN}\n"
    )


def solved_example(text: str, tests: Sequence[str], code: str) -> str:
    """A task followed by its solution, as it stands in a few-shot prompt and in training."""
    return f"{task_prompt(text, tests)}{code}\n{DONE}"


@lru_cache
def _read(name: str) -> tuple[Task, ...]:
    lines = (_HERE / name).read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)
