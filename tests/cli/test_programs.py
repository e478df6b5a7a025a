"""Programs with their models enabled: what `run` does, and `serve` refuses, which tests/clients asks for answers."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import import_utils

import hf_fastdecode as fd
from hf_fastdecode.enabled_loading import VARIABLE, enabled_loading

from ..fresh_processes import run_fresh
from ..tiny_models import tiny_model
from .command_line import ran, refusal


@pytest.fixture(params=[True, False], ids=["installed", "not-installed"])
def installed(request, monkeypatch):
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: request.param)
    return request.param


def test_continuous_batching_is_refused(installed):
    line = refusal("serve", "model", "--continuous-batching")
    assert "--continuous-batching decodes without `generate`" in line
    assert "run `transformers serve`" in line


def test_without_the_server_one_line_says_the_remedy(monkeypatch):
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: False)
    line = "hf-fastdecode: transformers' server is not installed; pip install 'transformers[serving]'\n"
    assert refusal("serve", "model", "--port", "1") == line


SCRIPT = """
import os, subprocess, sys
print(sys.argv[1:], __name__, "transformers" in sys.modules)
import beside
from transformers import AutoModelForCausalLM
import hf_fastdecode as fd
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(fd.explain(model).enabled, vars(model)["_hf_fastdecode"].options.reuse_prefix, flush=True)
if sys.argv[2] == "child":
    subprocess.run([sys.executable, __file__, sys.argv[1], "leaf"], check=True)
elif sys.argv[2] == "raise":
    raise RuntimeError("as asked")
elif sys.argv[2] == "leave":
    sys.exit(7)
"""

# The command, and what is left of it behind the program's end.
COMMAND = """
import os, sys
from hf_fastdecode.__main__ import main
before = dict(os.environ), sys.argv
try:
    main()
finally:
    from transformers import PreTrainedModel
    assert not hasattr(PreTrainedModel.from_pretrained, "__wrapped__")
    assert (dict(os.environ), sys.argv) == before
    assert not any(type(finder).__module__ == "hf_fastdecode.enabled_loading" for finder in sys.meta_path)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("program")
    tiny_model().save_pretrained(found / "model")
    (found / "program.py").write_text(SCRIPT)
    (found / "beside.py").write_text("")
    return found


def run_program(folder, ending):
    return run_fresh(COMMAND, "run", "--reuse-prefix", str(folder / "program.py"), str(folder / "model"), ending)


def test_a_script_and_what_it_starts(folder):
    done = run_program(folder, "child")
    assert done.returncode == 0, done.stderr
    first, second = (f"['{folder / 'model'}', '{ending}'] __main__ False" for ending in ("child", "leaf"))
    assert done.stdout.splitlines() == [first, "True True", second, "True True"]
    assert done.stderr.count("hf-fastdecode: enabled LlamaForCausalLM\n") == 2


def test_a_script_that_fails(folder):
    done = run_program(folder, "raise")
    assert done.returncode == 1
    trace = done.stderr[done.stderr.index("Traceback") :]
    assert trace.splitlines()[1].startswith(f'  File "{folder / "program.py"}", line ')
    assert trace.endswith("RuntimeError: as asked\n")


def test_exit_codes_are_the_programs(folder):
    assert run_program(folder, "leave").returncode == 7


@pytest.fixture
def restored(monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])


def test_modules_and_commands_by_name(tmp_path, monkeypatch, restored):
    (tmp_path / "of_a_folder.py").write_text("import sys\nprint(sys.argv[1:], __name__)\n")
    monkeypatch.chdir(tmp_path)
    assert ran("run", "-m", "of_a_folder", "--mode", "eager").stdout == "['--mode', 'eager'] __main__\n"
    assert ran("run", "hf-fastdecode", "--version").stdout.startswith(f"hf-fastdecode {fd.__version__} ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["hf-fastdecod"],
            "neither a file nor a command of a package in {prefix}; a module is named after -m; did you",
        ),
        (["-m", "no_such.module"], "there is no module 'no_such.module' in {prefix} or the current folder"),
        (["--mode", "fast", "x.py"], "mode must be one of auto, eager, graph, got 'fast'"),
        (["--stock", "--reuse-prefix", __file__], "--reuse-prefix is for hf_fastdecode, and --stock runs without it"),
    ],
)
def test_what_is_refused(words, said, restored):
    assert said.format(prefix=sys.prefix) in refusal("run", *words)


def test_what_is_loaded_is_enabled_until_the_end(folder):
    before, environment = vars(PreTrainedModel)["from_pretrained"], dict(os.environ)
    with pytest.raises(RuntimeError, match="in the body"), enabled_loading(mode="eager"):  # noqa: PT012
        assert os.environ[VARIABLE] == '{"mode": "eager"}'
        plain, said = AutoModelForCausalLM.from_pretrained(folder / "model"), None
        told, said = type(plain).from_pretrained(folder / "model", output_loading_info=True, dtype=torch.float32)
        assert "missing_keys" in said
        assert fd.explain(plain).enabled
        assert fd.explain(told).enabled
        decoder = AutoModel.from_pretrained(folder / "model")
        assert not hasattr(decoder, "generate")
        assert fd.explain(decoder).enabled
        raise RuntimeError("in the body")
    assert vars(PreTrainedModel)["from_pretrained"] is before
    assert dict(os.environ) == environment
    assert not fd.explain(plain).enabled
    assert not fd.explain(told).enabled


def test_a_script_knows_its_place_after_it_changed_the_folder(tmp_path, monkeypatch, restored):
    """`__file__` is absolute, as in Python's own start of a script."""
    (tmp_path / "script.py").write_text(
        f"import os\nos.chdir({str(tmp_path.parent)!r})\nprint(open(__file__).read())\n"
    )
    monkeypatch.chdir(tmp_path)
    assert "os.chdir" in ran("run", "script.py").output
