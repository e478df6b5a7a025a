"""Measurements: rows of CSV files, each with device, versions, commit and command; a resumable run of cases times
ways; Markdown tables.
"""

from __future__ import annotations

import csv
import hashlib
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from .. import __version__
from ..attention.torch_operators import BACKEND_VARIABLE
from ..errors import InputError, out_of_memory
from ..files import partial_of, read_rows, write_rows

if TYPE_CHECKING:
    import torch


Measurement = dict[str, str]
"""A line of results: its columns by name, as a CSV file has them."""

# Options that say nothing about what is measured, and how many words their values are.
_SILENT_OPTIONS = {"out": 1, "wait": 1, "plot": 0}


def provenance(device: torch.device | str, *, backend: str | None = None) -> dict[str, Any]:
    """The columns that every measurement begins with; a backend stands before the command, as in a shell."""
    import torch  # here, since rows are also read where its seconds would be lost
    import transformers

    return {
        "device": device_name(torch.device(device)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_fastdecode": __version__,
        "commit": _commit(),
        "command": " ".join([*([f"{BACKEND_VARIABLE}={backend}"] if backend else []), _program(), *_arguments()]),
    }


def device_name(device: torch.device) -> str:
    """The name of a CUDA GPU; of a CPU its architecture, and the number of torch's threads; of others the kind."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _arguments() -> list[str]:
    arguments: list[str] = []
    skip = 0
    for argument in sys.argv[1:]:
        name, given, _ = argument.removeprefix("--").partition("=")
        if skip:
            skip -= 1
        elif argument.startswith("--") and name in _SILENT_OPTIONS:
            skip = 0 if given else _SILENT_OPTIONS[name]
        else:
            arguments.append(argument)
    return arguments


def _program() -> str:
    """The program of this process, such as ``python -m hf_fastdecode``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return Path(sys.argv[0]).name
    return f"python -m {spec.name.removesuffix('.__main__')}"


def _commit() -> str:
    """The commit measured, or `$COMMIT`; after it, when files have changed, ``+`` and a hash of the sources."""
    if given := os.environ.get("COMMIT"):
        return given
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=package, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/*.py")
        return git("rev-parse", "--short=12", "HEAD") + (f"+{_hash_of_sources(package)}" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return f"unknown+{_hash_of_sources(package)}"


def _hash_of_sources(package: Path) -> str:
    """A hash of the package's files, and of those beside the module that ``python -m`` started."""
    folders, spec = {package}, getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.origin is not None:
        folders.add(Path(spec.origin).resolve().parent)
    digest = hashlib.sha256()
    for path in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


class NotAvailableError(Exception):
    """A way cannot run here; the message says why."""


def status_of(error: Exception) -> str:
    """The status of a measurement that raised: memory and refusals are results, all else has failed."""
    if out_of_memory(error):
        return "out of memory"
    # A mode that is asked for by name runs or raises so.
    if isinstance(error, NotAvailableError) or (isinstance(error, ValueError) and " cannot run: " in str(error)):
        return f"not run: {error}"
    return "failed: " + textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")


@dataclass(frozen=True)
class Case:
    """A case to measure."""

    def columns(self) -> dict[str, Any]:
        """Columns that identify the case."""
        return asdict(self)


def check_out(out: Path) -> None:
    """Refuse a file that rows cannot be written to, or that holds something else, before anything is measured."""
    try:
        if out.is_dir():
            raise InputError(f"`out` must be a CSV file, {str(out)!r} is a directory; name a file in it")
        if out.exists() and not out.is_file():
            raise InputError(f"`out` must be a CSV file, {str(out)!r} is a device or a pipe; name a file")
        if out.exists() and out.stat().st_size and not all("way" in row for row in read_rows(out) or [{}]):
            raise InputError(f"`out` {str(out)!r} exists and holds no measured rows; name another file")
        partial = partial_of(out.resolve())
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise InputError(f"`out` {str(out)!r} cannot be written: {error.strerror}; name another file") from error
    except (UnicodeError, csv.Error) as error:
        raise InputError(f"`out` {str(out)!r} exists and is no CSV file ({error}); name another file") from error


C = TypeVar("C", bound=Case)

# A measurement is made again, unless these, the case and the way are the same.
_SAME_RUN = ("device", "torch", "transformers", "commit", "command")

_SHOWN = (
    *("case", "shape", "context", "problems", "questions", "samples", "n", "finish", "to_token", "way", "variant"),
    *("us_p50", "over_floor", "tb_per_s", "first_call_s", "prefill_s", "ms_per_step", "tokens_per_s", "total_s"),
    *("ms_per_step_p50", "last_sample_s"),
)


def run(
    cases: Sequence[C],
    ways: Sequence[str],
    measure: Callable[[C, str], dict[str, Any]],
    *,
    provenance: dict[str, Any],
    out: Path,
) -> list[Measurement]:
    """Measure every way of every case, and write each measurement to the CSV file `out` when it is made.

    Measurements that `out` already has from the same commit and command are kept and not made again. Measurements of
    another commit, command or version are replaced when the same case, way and device is measured again (a message
    says how many); all others are kept. Consecutive cases should share expensive setup. `measure` gives the columns of
    a case and a way, ``status`` among them, and `provenance` those that every measurement begins with. Returns the
    measurements of these cases and ways, as `read_rows` reads them.
    """
    earlier = read_rows(out) if cases and out.exists() else []
    made = {_key(measurement, cases[0]): measurement for measurement in earlier}
    asked = [(case, way, {**provenance, **case.columns(), "way": way}) for case in cases for way in ways]
    keys = [_key(head, case) for case, _, head in asked]
    if others := len({key for key, (*_, head) in zip(keys, asked, strict=True) if _is_replaced(made.get(key), head)}):
        print(
            f"{others} of {len(asked)} rows are in {out} from another commit, command or version and are replaced; "
            "name another file to keep them",
            file=sys.stderr,
        )
    kept = 0
    try:
        with tqdm(total=len(asked), unit="row", dynamic_ncols=True, disable=None) as bar:
            for key, (case, way, head) in zip(keys, asked, strict=True):
                bar.set_postfix_str(f"{next(iter(case.columns().values()))} {way}", refresh=True)
                if not _is_done(made.get(key), head):
                    found = head | measure(case, way)
                    made[key] = {name: "" if value is None else str(value) for name, value in found.items()}
                    write_rows(out, list(made.values()))
                    tqdm.write(brief(made[key]), file=sys.stderr)
                else:
                    kept += 1
                bar.update()
    except KeyboardInterrupt:
        if made:
            write_rows(out, list(made.values()))  # once more, if that is what was broken off
        done = sum(_is_done(made.get(key), head) for key, (*_, head) in zip(keys, asked, strict=True))
        print(
            f"interrupted: {done} of {len(asked)} rows are in {out}; run the same command again to go on",
            file=sys.stderr,
        )
        raise
    if kept:
        print(
            f"{kept} of {len(asked)} rows are those of an earlier run, kept in {out}; delete it to measure again",
            file=sys.stderr,
        )
    return [made[key] for key in keys]


def failed(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Measurements whose check failed or that raised an error."""
    return [measurement for measurement in measurements if measurement["status"].startswith(("wrong", "failed"))]


def brief(measurement: Measurement) -> str:
    shown = [(name, measurement[name]) for name in _SHOWN if measurement.get(name)]
    parts = [value if name in ("case", "shape", "way") else f"{name}={_short(value)}" for name, value in shown]
    return "  ".join(parts + ([measurement["status"]] if measurement["status"] != "ok" else []))


def _short(value: str) -> str:
    try:
        return f"{float(value):.4g}" if "." in value else value
    except ValueError:
        return value


def _key(measurement: dict[str, Any], case: Case) -> tuple[Any, ...]:
    return tuple(str(measurement.get(name, "")) for name in ("device", *case.columns(), "way"))


def _is_done(measurement: Measurement | None, head: dict[str, Any]) -> bool:
    if measurement is None or failed([measurement]):
        return False
    return all(measurement.get(name) == str(head[name]) for name in _SAME_RUN)


def _is_replaced(measurement: Measurement | None, head: dict[str, Any]) -> bool:
    """Whether a measurement of another run is lost when this one is made."""
    return measurement is not None and not failed([measurement]) and not _is_done(measurement, head)


def markdown(names: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A Markdown table, with a note in a paragraph after it."""
    table = "\n".join([*head(names), *map(line, rows)]) + "\n"
    return f"{table}\n{note}\n" if note else table


def head(names: Sequence[str]) -> list[str]:
    return [line(names), "|" + "---|" * len(names)]


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def by(rows: Iterable[Measurement], *columns: str) -> list[dict[str, Measurement]]:
    """The measurements of each case by way, in the order given; a case is what has the same values in `columns`."""
    cases: dict[tuple[str, ...], dict[str, Measurement]] = {}
    for row in rows:
        cases.setdefault(tuple(row.get(name, "") for name in columns), {})[row["way"]] = row
    return list(cases.values())
