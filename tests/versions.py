"""Run the tests on the oldest transformers that is supported, and on the newest that pip serves now.

    python -m tests.versions [arguments of pytest]

Each has an environment of its own, in ``.venv-versions``. That of the oldest has the versions of constraints.txt but
for those of constraints-oldest.txt; that of the newest has the newest of everything, whatever pyproject.toml says of
transformers, but for torch and what belongs to it. The last lines say what each came to.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

ROOT = Path(__file__).resolve().parents[1]
_SUMMARY = re.compile(r"=* ?(\d+ (?:passed|failed|error).* in [\d.]+s.*?) ?=*$")
_WITH_TORCH = ("torch", "triton")


def pins(name: str) -> dict[str, str]:
    """Package -> line of a constraints file."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {re.split("[=<>]", line)[0].lower(): line for line in lines}


def environment(name: str) -> Path:
    """The interpreter of an environment, made if it is missing."""
    folder = ROOT / ".venv-versions" / name
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    return python


def install(python: Path, constraints: dict[str, str], *arguments: str) -> None:
    """Install the package, editable, with the dev extra; torch first: all else then uses the build that pip finds."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    with NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(constraints.values()))
        file.flush()
        for what in ([constraints["torch"]], [*arguments, "--editable", f"{ROOT}[dev]"]):
            subprocess.run([*pip, "--constraint", file.name, *what], check=True)


def run(python: Path, arguments: list[str]) -> tuple[bool, str]:
    """Run pytest, which prints as it goes; whether it passed, and its last line."""
    summary = "pytest did not come to its end"
    command = [python, "-m", "pytest", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if found := _SUMMARY.search(line):
                summary = found[1]
    return process.returncode == 0, summary


def version(python: Path) -> str:
    """The installed transformers' version."""
    code = "from importlib.metadata import version; print(version('transformers'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: list[str]) -> int:
    """Run both; 1 if any test failed."""
    pinned = pins("constraints.txt")
    oldest, newest = environment("oldest"), environment("newest")
    print("installing the oldest supported and the newest transformers into .venv-versions; this takes some minutes")
    install(oldest, pinned | pins("constraints-oldest.txt"))
    install(newest, {name: pinned[name] for name in _WITH_TORCH}, "--upgrade", "--upgrade-strategy", "eager")
    upgrade = [newest, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--upgrade", "transformers"]
    subprocess.run(upgrade, check=True)  # beyond what pyproject.toml promises
    outcomes = {}
    for name, python in (("oldest", oldest), ("newest", newest)):
        outcomes[f"transformers {version(python)} ({name})"] = run(python, arguments)
    for name, (_, summary) in outcomes.items():
        print(f"{name}: {summary}")
    return int(not all(passed for passed, _ in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
