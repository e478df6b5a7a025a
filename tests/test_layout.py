"""What an import changes (nothing), and what an installation exposes (one name)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_import_registers_names_and_changes_nothing(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{IMPORT}"
    seen = run_python(code, cwd=tmp_path)
    assert seen["changed"] == []
    foreign = [name for name in seen["added"] if not str(name).partition(" registry: ")[2].startswith("hf_fastdecode")]
    assert foreign == []
    assert "attention registry: hf_fastdecode" in seen["added"]


def test_installation_exposes_only_the_package(tmp_path: Path) -> None:
    try:
        importlib.metadata.distribution("hf-fastdecode")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("hf-fastdecode is not installed")
    names = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name.isidentifier()]
    found = run_python(FIND, *names, cwd=tmp_path)
    assert "hf_fastdecode" in found
    exposed = {name for name in found if {str(ROOT / name), str(ROOT / name / "__init__.py")} & set(found[name])}
    assert exposed <= {"hf_fastdecode"}
