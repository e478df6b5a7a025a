"""What an import changes (nothing), and what an installation exposes (one name)."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import hf_fastdecode

from .fresh_processes import run_fresh

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hf_fastdecode"
LINKED = ("conversion", "patches", "evals")

IMPORT = """
import json
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.llama import modeling_llama

registries = {"attention": ALL_ATTENTION_FUNCTIONS, "mask": ALL_MASK_ATTENTION_FUNCTIONS}
classes = (Cache, DynamicCache, GenerationMixin, PreTrainedModel, modeling_llama.LlamaAttention)
scopes = {scope.__name__: scope for scope in (*classes, modeling_llama)}


def state():
    names = {f"{kind} registry: {name}": registry[name] for kind, registry in registries.items() for name in registry}
    for scope_name, scope in scopes.items():
        names |= {f"{scope_name}.{name}": value for name, value in vars(scope).items() if not name.startswith("__")}
    return names


before = state()
from hf_fastdecode import *  # the names are imported when they are first used
after = state()

changed = [name for name in before if after.get(name) is not before[name]]
print(json.dumps({"changed": changed, "added": [name for name in after if name not in before]}))
"""

REGISTER = """
import json, sys
import hf_fastdecode
from transformers import AutoConfig  # the slim configs are registered with it

AutoConfig.for_model("llama")
print(json.dumps(list(sys.modules)))
"""

FIND = """
import importlib.util, json, sys
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
found = {name: [spec.origin, *(spec.submodule_search_locations or ())] for name, spec in specs.items() if spec}
print(json.dumps(found))
"""


def run_python(code: str, *args: str, cwd: Path) -> dict[str, list[str | None]]:
    """Run code in a fresh isolated interpreter (no PYTHONPATH, no script folder), and parse the JSON it prints."""
    command = [sys.executable, "-I", "-c", code, *args]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", LINKED)
def test_root_links_to_the_package_folder(name: str) -> None:
    link = ROOT / name
    if not (PACKAGE / name).is_dir():
        assert not link.is_symlink(), f"{link} dangles"
        pytest.skip(f"hf_fastdecode has no folder {name}")
    assert link.is_symlink(), f"{link} is not a symbolic link"
    assert os.readlink(link) == f"hf_fastdecode/{name}"


def test_import_registers_names_and_changes_nothing() -> None:
    done = run_fresh(IMPORT)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["changed"] == []
    foreign = [name for name in seen["added"] if not str(name).partition(" registry: ")[2].startswith("hf_fastdecode")]
    assert foreign == []
    assert "attention registry: hf_fastdecode" in seen["added"]


def test_import_and_registration_import_no_modelling_code() -> None:
    done = run_fresh(REGISTER)
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout.splitlines()[-1])
    assert "hf_fastdecode.patches.slim_configs" in imported
    modelling = r"transformers\.models\.(?!auto\.).*modeling_|hf_fastdecode\.patches\.(architectures|decoder|layers)\b"
    assert not [name for name in imported if re.match(modelling, name)]


@pytest.fixture
def installed() -> None:
    """Skip where the environment's package is not this checkout, editable."""
    try:
        origin = importlib.metadata.distribution("hf-fastdecode").read_text("direct_url.json") or "{}"
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hf-fastdecode is not installed")
    if json.loads(origin).get("url") != ROOT.as_uri():
        pytest.skip("hf-fastdecode is installed from another folder")


@pytest.mark.usefixtures("installed")
def test_installation_exposes_only_the_package(tmp_path: Path) -> None:
    names = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier()]
    found = run_python(FIND, *names, cwd=tmp_path)
    assert "hf_fastdecode" in found
    inside = {name for name in found if any(ROOT in Path(str(place)).resolve().parents for place in found[name])}
    assert inside == {"hf_fastdecode"}


@pytest.mark.usefixtures("installed")
def test_beside_a_clone_the_package_is_imported_and_not_the_clone(tmp_path: Path) -> None:
    (tmp_path / "hf_fastdecode").mkdir()  # as `import` sees a clone: a folder without __init__.py
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in ("-c", "import hf_fastdecode; hf_fastdecode.__all__"), ("-m", "hf_fastdecode", "--version"):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_version_stands_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert hf_fastdecode.__version__ == version
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


TYPED = """
import hf_fastdecode as fd

model, tokenizer = fd.load_embedded()
fuse: bool = False
fd.enable(model, backend="triton", mode="graph", sampler="fast", fuse_projections=fuse)
fd.enable(model, backend="tritno")
fd.enable(model, mode="grpah")
fd.enable(model, sampler="fats")
fd.SharedContextCache(backend="tritno")
"""
_UNCHECKED = "accelerate datasets huggingface_hub matplotlib numpy packaging rich safetensors tokenizers torch tqdm"
UNCHECKED = [f"{name}.*" for name in f"{_UNCHECKED} transformers triton typer".split()]


@pytest.mark.usefixtures("installed")
def test_type_checkers_see_an_editable_install(tmp_path: Path) -> None:
    (tmp_path / "hf_fastdecode").mkdir()  # the user works beside a clone
    (tmp_path / "user.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text(f"[mypy]\n[mypy-{','.join(UNCHECKED)}]\nfollow_imports = skip\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "user.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    found = [re.sub(r" error: .* ", " ", line) for line in done.stdout.splitlines()]
    wrong = range(TYPED[: TYPED.index("tritno")].count("\n") + 1, TYPED.count("\n") + 1)
    assert found == [f"user.py:{line}: [arg-type]" for line in wrong], done.stdout + done.stderr


# What may import what: a layer those before it. Between those of one set there is no way. Layers are files and folders
# of the package; conversion/fit is one apart from the rest of its folder.
LAYERS = (
    *(
        {"_compat", "errors", "log", "instance_methods", "hook_roles"},
        {"dtypes", "files"},
        {"kernels"},
        {"attention"},
        {"parallel"},
        {"cache"},
    ),
    *(
        {"conversion/fit"},
        {"generation", "patches"},
        {"forward"},
        {"assets"},
        {"api"},
        {"trainer_callback", "enabled_loading"},
        {"measurement"},
        {"model_names"},
        {"model_loading"},
    ),
    *({"conversion"}, {"evals"}, {"cli"}, {"__main__"}),
)


def layer_of(parts: Sequence[str]) -> str:
    """The layer of a module, by the parts of its name within the package."""
    return "conversion/fit" if list(parts[:2]) == ["conversion", "fit"] else parts[0]


def imported_layers(path: Path) -> set[str]:
    """Layers of the package that a file imports from, by relative and by absolute names."""
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        names = node.module.split(".") if node.module else []
        if node.level:
            names = [*inside[: len(inside) - node.level], *names]
        elif names[0] != PACKAGE.name:
            continue
        else:
            names = names[1:]
        modules = [names] if names else [[alias.name] for alias in node.names]
        if names and (PACKAGE / Path(*names)).is_dir():  # names of a package may be its modules
            modules = [[*names, alias.name] for alias in node.names]
        found |= {layer_of(module) for module in modules}
    return found


def test_every_file_has_a_layer():
    files = {layer_of(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    assert files - {"__init__"} == set.union(*LAYERS)


@pytest.mark.parametrize("layer", sorted(set.union(*LAYERS)))
def test_imports_point_one_way(layer):
    place = next(index for index, names in enumerate(LAYERS) if layer in names)
    above = set.union(*LAYERS[place:]) - {layer}
    paths = [
        path for path in PACKAGE.rglob("*.py") if layer_of(path.relative_to(PACKAGE).with_suffix("").parts) == layer
    ]
    assert paths
    wrong = {str(path.relative_to(PACKAGE)): found for path in paths if (found := imported_layers(path) & above)}
    assert not wrong


def imported_packages(path: Path) -> set[str]:
    """The first names of a file's absolute imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


def test_the_package_imports_nothing_else_of_the_repository():
    """Benchmarks may import anything of the package, which does without them: they are not in the wheel."""
    for path in PACKAGE.rglob("*.py"):
        assert not imported_packages(path) & {"benchmarks", "tests", "tools"}, path


def test_kernels_know_nothing_of_transformers():
    for path in (PACKAGE / "kernels").rglob("*.py"):
        assert "transformers" not in imported_packages(path), path


def imports(folder: Path) -> dict[str, set[str]]:
    """For each module of a folder, its modules that it imports, at any place and for types only too."""
    modules = {path.relative_to(ROOT).with_suffix("").parts: path for path in folder.rglob("*.py")}
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        targets: set[tuple[str, ...]] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = (*name[: len(name) - node.level], *(node.module or "").split("."))
                targets |= {base, *((*base, alias.name) for alias in node.names)}
        found[".".join(name)] = {".".join(filter(None, target)) for target in targets}
    return {name: targets & found.keys() for name, targets in found.items()}


@pytest.mark.parametrize("folder", ["benchmarks", "hf_fastdecode"])
def test_no_modules_import_each_other(folder):
    """Not even through others, nor for types only: what needs each other is one file, or three."""
    left = imports(ROOT / folder)
    assert any(left.values())
    while leaves := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left


@pytest.mark.parametrize("layer", ["attention", "cache", "generation"])
def test_the_core_names_no_layout_of_a_cache_and_no_layer_that_stands_for_all(layer):
    for path in sorted((PACKAGE / layer).rglob("*.py")):
        with tokenize.open(path) as file:
            names = {one.string for one in tokenize.generate_tokens(file.readline) if one.type == tokenize.NAME}
        assert not [name for name in names if "slim" in name.lower()], path
        assert not re.search(r"layers\[(0|-1)\]|next\(iter\(\w*\.?(attention_)?layers", path.read_text()), path


# Files that run other programs with their flags.
PROGRAMS = (
    *("evals/sandbox/__init__.py", "evals/sandbox/backends.py"),
    *("evals/harness.py", "evals/scoring/java_and_javascript.py", "evals/scoring/runner.py"),
    "kernels/slim_decode/cluster.py",
)
GIT = {"--format=%cs", "--no-patch", "--porcelain", "--short=12"}
SILENT = {"--out", "--plot"}  # left out of the command that measurements name


def strings(path: Path) -> Iterator[str]:
    """The string literals of a file, without docstrings."""
    tree = ast.parse(path.read_text())
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def test_nothing_below_the_command_line_names_an_option():
    """Messages name arguments in backticks, which the command line shows as its options."""
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        place = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT / "benchmarks")
        if place.parts[0] == "cli" or place.as_posix() in PROGRAMS:
            continue
        assert not [one for one in strings(path) if one not in GIT | SILENT and re.search(r"(?<!-)--[a-z]", one)], path


def test_what_is_imported_is_declared():
    """What an extra brings, or only a GPU's environment has, is imported where it is used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [re.match(r"[\w-]+", one)[0] for one in project["dependencies"]]
    allowed = {name.replace("-", "_") for name in named} | {"lm_eval", "triton", "scipy", "cuda"} | {PACKAGE.name}
    for path in PACKAGE.rglob("*.py"):
        assert imported_packages(path) - sys.stdlib_module_names <= allowed, path
