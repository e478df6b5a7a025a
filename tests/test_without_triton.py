"""Where Triton is not installed, as beside a CPU build of PyTorch, all works but the kernels, whose reason says so."""

from __future__ import annotations

import json

from .fresh_processes import run_fresh

WITHOUT_TRITON = """
import sys

for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
    del sys.modules[name]
sys.modules["triton"] = None  # so that it is neither found nor imported
"""

IMPORT_ALL = (
    WITHOUT_TRITON
    + """
import importlib, json, pkgutil
import benchmarks, hf_fastdecode

needing = []
folders = [(hf_fastdecode.__path__, "hf_fastdecode."), (benchmarks.__path__, "benchmarks.")]
for module in (one for folder in folders for one in pkgutil.walk_packages(*folder)):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:  # of triton, or of what an extra brings
        if error.name.partition(".")[0] == "triton":
            needing.append(module.name)
print(json.dumps(needing))
"""
)

GENERATE = (
    WITHOUT_TRITON
    + """
import json, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
import hf_fastdecode as fd
from hf_fastdecode.conversion import convert
from hf_fastdecode.conversion.layer_converter import PlanChoice
from hf_fastdecode.kernels.failures import Kernel, KernelFailedError, failure
from hf_fastdecode.kernels.pointwise.api import rms_norm
from hf_fastdecode.kernels.pointwise.api import NormForm

said = {}
model, _ = fd.load_embedded()
prompt = {"input_ids": torch.arange(90)[None] + 3}
calls = {"num_return_sequences": 8, "do_sample": True, "max_new_tokens": 4}


def generate(model, **options):
    torch.manual_seed(0)
    return model.generate(**prompt, **calls, **options)


stock = generate(model)
with fd.enabled(model):
    said["same"] = generate(model).equal(stock)
    said["path"], said["report"] = fd.explain(model).last_call.path, str(fd.explain(model))
for option in {"backend": "triton"}, {"sampler": "fast"}:
    try:
        with fd.enabled(model, **option):
            generate(model)
    except ValueError as error:
        said |= {name: str(error) for name in option}
target = Path(sys.argv[1], "slim")
convert.draw_report = lambda report, path: path.touch()  # which takes longer than all else
convert.convert_checkpoint(convert.Settings("embedded", target, choice=PlanChoice(plan="k")))
slim = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
stock = generate(slim)
with fd.enabled(slim):
    said["slim"] = fd.explain(slim).model_reason or generate(slim).equal(stock)
said["failure"] = failure(Kernel.POINTWISE, model.device)
try:
    rms_norm(torch.ones(4), torch.ones(4), 1e-6, NormForm.ROUNDED)
except KernelFailedError as error:
    said["launch"] = str(error)
print(json.dumps(said))
"""
)

KERNEL_FILES = "hf_fastdecode.kernels.", "benchmarks.ops.kernel_ways"


def test_all_but_kernels_can_be_imported():
    done = run_fresh(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    needing = json.loads(done.stdout.splitlines()[-1])
    assert needing
    assert not [name for name in needing if not name.startswith(KERNEL_FILES)]


def test_calls_share_and_slim_models_load(tmp_path):
    done = run_fresh(GENERATE, str(tmp_path), TRITON_INTERPRET="1")  # which asks for what is not there
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["same"] is True
    assert said["path"] == "shared"
    assert said["slim"] is True
    for name in "backend", "sampler", "failure":
        assert "triton is not installed" in said[name], name
    assert "ModuleNotFoundError" in said["launch"]
    assert "(triton is not installed)" in said["report"]
