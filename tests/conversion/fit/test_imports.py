"""The mathematics needs PyTorch alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ...test_layout import PACKAGE, ROOT, imported_layers

CODE = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import torch
before = set(sys.modules)
import hf_fastdecode.conversion.fit as fit
modules = [importlib.import_module(f"{fit.__name__}.{one.name}") for one in pkgutil.iter_modules(fit.__path__)]
assert len(modules) >= 4
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""


def test_importing_it_imports_torch_only(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-c", CODE, str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["hf_fastdecode"], done.stderr


def test_it_stands_alone_in_the_package() -> None:
    for path in (PACKAGE / "conversion" / "fit").glob("*.py"):
        assert imported_layers(path) <= {"conversion/fit"}, path
