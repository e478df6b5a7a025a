"""The settings of a run, which decide its samples, and the file that keeps runs apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ...command_errors import CommandError
from ..report.files import write_text
from ..report.latency import Way

SETTINGS: Final = "settings.json"
_FINGERPRINT: Final = "fingerprint"


@dataclass(frozen=True)
class RunSettings:
    """Everything that decides which samples a run draws.

    Attributes:
        model: Name or folder of the checkpoint.
        weights: Digest of the model's parameters, see `weights_digest`.
        task: Name of the tasks.
        prompts: Digest of task ids and prompts, in order, see `prompts_digest`.
        format: Of the prompts.
        n: Samples of each task.
        temperature: Divides the logits; 0 for greedy.
        top_p: Draw from the smallest set of tokens of this probability; 1 is off. top_k is always off: `generate`
            would else cut at 50 tokens.
        max_new_tokens: Most tokens of a sample.
        seed: From which the seed of every call is derived.
        rows: Most rows of a call: tasks share a call until their samples are so many, and the samples of a task are
            drawn in chunks of so many. Which rows share a call decides rounding and random numbers.
        way: ``shared`` (hf_fastdecode) or ``stock``.
        mode: Of `hf_fastdecode.enable`.
        sampler: Of `hf_fastdecode.enable`.
        dtype: Of the parameters.
        device: Its type.
    """

    model: str
    weights: str
    task: str
    prompts: str
    format: str
    n: int
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    rows: int
    way: Way = "shared"
    mode: str = "auto"
    sampler: str = "auto"
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def fingerprint(self) -> str:
        """Equal for runs that draw the same samples."""
        return _digest(asdict(self))


def prompts_digest(task_ids: Sequence[str], prompts: Sequence[str]) -> str:
    """A hash of the tasks' ids and prompts in order."""
    return _digest([list(task_ids), list(prompts)])


def weights_digest(model: Any) -> str:
    """A hash of the model's parameters: names, shapes, dtypes, and 64 evenly spaced values of each."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        values = parameter.detach().reshape(-1)
        count = min(64, len(values))
        at = torch.arange(count, device=values.device) * (len(values) - 1) // max(1, count - 1)
        digest.update(values[at].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def claim_folder(folder: Path, settings: RunSettings, provenance: dict[str, Any]) -> None:
    """Make the folder that of this run, or check that it is.

    Args:
        folder: Of the run; it is made if need be.
        settings: Of the run.
        provenance: Versions and the like, kept beside the settings of the first start for people.

    Raises:
        CommandError: The folder holds a run with other settings, or its settings cannot be read.
    """
    path = folder / SETTINGS
    if not path.exists():
        content = {**asdict(settings), _FINGERPRINT: settings.fingerprint, "provenance": provenance}
        write_text(path, lambda file: file.write(json.dumps(content, indent=2) + "\n"))
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kept = found[_FINGERPRINT]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{path} is not the settings of a run; name another --out") from error
    if kept == settings.fingerprint:
        return
    for name, value in asdict(settings).items():
        if found.get(name) != value:
            raise CommandError(
                f"{folder} holds a run with another {_WORDS.get(name, name)} ({found.get(name)!r}, now {value!r}); "
                "name another --out, or use the run's own options to go on with it"
            )
    raise CommandError(f"{path} was changed by hand; name another --out")


_WORDS: Final = {
    "weights": "digest of the weights",
    "prompts": "digest of the tasks and prompts (--limit, --task-ids, --data, --shots)",
    "rows": "--rows",
    "n": "--n",
}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
