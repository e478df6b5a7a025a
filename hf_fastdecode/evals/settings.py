"""The settings of a run, which decide its samples, and its folder: names of files, and what keeps runs apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import InputError
from ..files import exclusive, write_json
from .queue import part_files
from .records import Way

SETTINGS: Final = "settings.json"
SAMPLES: Final = "samples.jsonl"
VERDICTS: Final = "verdicts.jsonl"
LATENCY: Final = "latency.csv"

_FINGERPRINT: Final = "fingerprint"
_VERSIONS: Final = ("torch", "transformers", "hf_fastdecode")


def sample_files(folder: Path) -> list[Path]:
    """The files of samples in a run's folder: of one process, or of those that share the run."""
    return sorted([*folder.glob(SAMPLES), *part_files(folder / SAMPLES)])


@dataclass(frozen=True)
class Drawing:
    """How samples are drawn.

    With `processed`, log-probabilities after temperature and top-p are gathered too. Samples are then drawn by
    transformers' own sampler, from other random numbers than those of the sampling kernel.
    """

    temperature: float = 0.8  # divides the logits; 0 is greedy
    top_p: float = 0.95  # of the smallest set of tokens of this probability; 1 is off
    max_new_tokens: int = 128  # of a sample
    way: Way = "shared"
    mode: str = "auto"  # as for `hf_fastdecode.enable`
    sampler: str = "auto"  # as for `hf_fastdecode.enable`
    processed: bool = False

    def options(self) -> dict[str, Any]:
        """Arguments of `generate`. top_k is off: unset, it would be 50."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclass(frozen=True)
class RunSettings:
    """What decides which samples a run draws, except versions."""

    model: str  # name or folder of the checkpoint
    weights: str  # digest of weights, config and tokenizer: `generation.weights`
    dtype: str  # of the parameters
    device: str  # its type
    task: str  # name of the tasks
    prompts: str  # `prompts_digest`
    format: str  # name of the prompt format
    n: int  # samples of each task
    seed: int  # from which that of every call is derived
    rows: int  # most of a call: which rows share one decides rounding and random numbers
    drawing: Drawing = Drawing()

    def flat(self) -> dict[str, Any]:
        """Names and values, those of `drawing` among them."""
        own = asdict(self)
        return own | own.pop("drawing")


def prompts_digest(task_ids: Sequence[str], prompts: Sequence[Sequence[int]]) -> str:
    """A hash of the tasks' ids and of the tokens of their prompts, in order."""
    return _digest([list(task_ids), [list(prompt) for prompt in prompts]])


def claim_folder(folder: Path, settings: RunSettings, provenance: dict[str, Any]) -> None:
    """Write the run's settings into its folder, which is made if need be, or check that it has the same ones.

    The provenance has versions, which must not change within a run, and what else is kept for people. An InputError
    where the folder holds a run with other settings or versions, settings that cannot be read, or samples or verdicts
    without settings.
    """
    path = folder / SETTINGS
    deciding = settings.flat() | {name: provenance[name] for name in _VERSIONS if name in provenance}
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(path, None):  # processes of one launch come here at once
        if not path.exists():
            if kept := [*sample_files(folder), *folder.glob(VERDICTS)]:
                raise InputError(f"{folder} holds {kept[0].name} of no known run; name another `out`")
            content = {**settings.flat(), _FINGERPRINT: _digest(deciding), "provenance": provenance}
            write_json(path, content, indent=2)
            return
    found = read_settings(folder)
    if found[_FINGERPRINT] == _digest(deciding):
        return
    before = found["provenance"] | found
    for name, value in deciding.items():
        if before.get(name) != value:
            raise InputError(
                f"{folder} holds a run with another {_WORDS.get(name, name)} ({before.get(name)!r}, now {value!r}); "
                "name another `out`, or use the run's own options to go on with it"
            )
    raise InputError(f"{path} was changed by hand; name another `out`")


def read_settings(folder: Path) -> dict[str, Any]:
    """What `claim_folder` wrote: the settings by name, a fingerprint and the provenance; else an InputError."""
    path = folder / SETTINGS
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        int(found["n"]), found[_FINGERPRINT], dict(found["provenance"])
    except FileNotFoundError as error:
        raise InputError(f"{folder} is not the folder of a run: it has no {SETTINGS}; name another") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not the settings of a run; name another `out` or folder") from error
    return found


_WORDS: Final = {
    "weights": "digest of weights, config and tokenizer",
    "prompts": "digest of the tasks and prompts (`limit`, `task_ids`, `data`, `shots`)",
    "rows": "`rows`",
    "n": "`n`",
}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
