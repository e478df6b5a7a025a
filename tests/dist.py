"""Build the wheel and the sdist, list what the wheel holds, and try it in fresh environments, outside of the clone.

    python -m tests.dist [--quick] [PYTHON ...]

Environments are of the oldest and the newest of the given interpreters, by default of those found; in each, the wheel
is tried with the newest transformers that pip serves below the next major release, then with the oldest supported
one. With ``--quick`` there is one, of the first interpreter, with the versions of constraints.txt and without Triton,
as a CPU build of PyTorch leaves it. torch is always the one of constraints.txt. Trying is README's quickstart, and the
command line's help. It needs the standard library alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-dist"
DIST = ROOT / "dist"

# Measurements and pictures are for the pages of the repository.
_FOR_PAGES = re.compile(r"\.(csv|gif|ipynb|jpg|md|pdf|png|svg)$")
_READ = re.compile(r"hf_fastdecode/assets/MODEL_CARD\.md")

_QUICKSTART = """
report = str(fd.explain(model))
assert "last generate call: shared" in report, report
assert len(samples) == 8
"""


class Interpreter(NamedTuple):
    """A Python that can make environments."""

    version: tuple[int, ...]
    path: str

    @property
    def name(self) -> str:
        return ".".join(map(str, self.version))


def interpreters(given: Sequence[str]) -> list[Interpreter]:
    """Those given, or else those on the PATH and of pyenv, that this package supports: oldest first, one a version."""
    names = [f"python3.{minor}" for minor in range(11, 30)]
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = given or [*names, *map(str, sorted(pyenv.glob("versions/*/bin/python")))]
    found: dict[tuple[int, ...], Interpreter] = {}
    for candidate in candidates:
        code = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
        try:
            done = subprocess.run([candidate, "-c", code], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            if given:
                raise SystemExit(f"{candidate} is no Python that can make environments: {error}") from error
            continue
        version = tuple(map(int, done.stdout.split()))
        if version >= (3, 11):
            found.setdefault(version, Interpreter(version, candidate))
    if not found:
        raise SystemExit("no Python from 3.11 on was found; name some: make dist PYTHONS='python3.11 python3.13'")
    return [found[version] for version in sorted(found)]


def environment(name: str, python: str) -> Path:
    """The interpreter of a fresh environment."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([python, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def install(python: Path, *arguments: str | Path) -> None:
    """`pip install`, with a line for each package on the way."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if found := re.match(r"(?:Collecting|Processing) (\S+)", line):
                print(f"  {found[1].rpartition('/')[2]}", flush=True)
    if process.returncode:
        raise SystemExit(f"pip could not install {' '.join(map(str, arguments))}")


def pins(*names: str) -> list[str]:
    """Lines of constraints files."""
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def build(python: str) -> Path:
    """Build both from this checkout, the wheel from the sdist as pip would; returns the wheel."""
    builder = environment("build", python)
    install(builder, "--quiet", "build", "hatchling>=1.27")
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run([builder, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT], check=True)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    check_contents(wheel, sdist)
    return wheel


def check_contents(wheel: Path, sdist: Path) -> None:
    """List the wheel; exits where it holds what only pages need, or lacks a module."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {one.filename: one.file_size for one in archive.infolist()}
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    print(f"\n{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB; {sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB)")
    python = [name for name in sizes if name.endswith(".py")]
    for folder, count in sorted(Counter("/".join(Path(name).parts[:2]) for name in python).items()):
        print(f"  {folder}: {count} module(s)" if "." not in folder else f"  {folder}")
    for name in sorted(sizes.keys() - set(python)):
        print(f"  {name} ({sizes[name]:,} bytes)")
    for_pages = [name for name in sizes if _FOR_PAGES.search(name) and not _READ.fullmatch(name)]
    if for_pages:
        raise SystemExit(f"the wheel holds what only pages of the repository need: {', '.join(for_pages)}")
    if others := sorted({name.partition("/")[0] for name in python} - {"hf_fastdecode"}):
        raise SystemExit(f"the wheel holds folders of the repository: {', '.join(others)}")
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_fastdecode").rglob("*.py")}
    for archive_name, names in ((wheel.name, sizes.keys()), (sdist.name, sources)):
        if missing := sorted(modules - names):
            raise SystemExit(f"{archive_name} lacks {', '.join(missing)}")


def quickstart() -> str:
    """README's example on the embedded model."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if "load_embedded" in block)


def tried(python: Path) -> Iterator[str]:
    """Run the quickstart and the help, in an empty folder and without the clone; yields what was found."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    outside |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with TemporaryDirectory() as folder:
        Path(folder, "quickstart.py").write_text(quickstart() + _QUICKSTART)
        commands = {
            "quickstart": [python, "-W", "ignore", "quickstart.py"],
            "hf-fastdecode --help": [python.with_name("hf-fastdecode"), "--help"],
            "versions": [python, "-c", _VERSIONS],
        }
        for name, command in commands.items():
            done = subprocess.run(command, cwd=folder, env=outside, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"{name} failed in {python.parents[1]}:\n{done.stdout}{done.stderr}")
            if name == "versions":
                yield done.stdout.strip()


_VERSIONS = """
import importlib.metadata, importlib.util, sys
import hf_fastdecode
assert "site-packages" in hf_fastdecode.__file__, hf_fastdecode.__file__
versions = [f"{name} {importlib.metadata.version(name)}" for name in ("hf-fastdecode", "torch", "transformers")]
triton = "with" if importlib.util.find_spec("triton") else "without"
print("Python", sys.version.split()[0], *versions, triton, "Triton")
"""


def try_wheel(wheel: Path, python: str, name: str, constraints: Sequence[str], *more: Sequence[str]) -> list[str]:
    """Install the wheel in a fresh environment and try it; then again after each further list of packages."""
    fresh, found = environment(name, python), []
    limits = FOLDER / f"{name}.txt"
    limits.write_text("\n".join(constraints))
    print(f"\ninstalling {wheel.name} into {fresh.parents[1].relative_to(ROOT)}", flush=True)
    install(fresh, "--constraint", limits, wheel)
    found += tried(fresh)
    for packages in more:
        install(fresh, *packages)
        found += tried(fresh)
    return found


def main(arguments: list[str]) -> None:
    """Build and try; exits with the reason where anything fails."""
    quick = "--quick" in arguments
    known = interpreters([one for one in arguments if one != "--quick"])
    wheel = build(known[0].path)
    outcomes = []
    if quick:
        outcomes += try_wheel(wheel, known[0].path, "quick", pins("constraints.txt"))
        if not outcomes[0].endswith("without Triton"):
            print("this build of torch brings Triton, so that nothing was tried without it")
    else:
        torch = [line for line in pins("constraints.txt") if line.startswith("torch==")]
        for one in {known[0].version: known[0], known[-1].version: known[-1]}.values():
            outcomes += try_wheel(wheel, one.path, one.name, torch, pins("constraints-oldest.txt"))
        if len(known) == 1:
            print(f"only Python {known[0].name} was tried; name others: make dist PYTHONS='python3.11 python3.13'")
    print("\nthe quickstart and the command line's help ran with:")
    for outcome in outcomes:
        print(f"  {outcome}")


if __name__ == "__main__":
    main(sys.argv[1:])
