"""Programs that are started from a command line: `hf-fastdecode run`, and a callback of transformers' trainer."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace

import peft
import pytest
import torch
from typer.testing import CliRunner

import hf_fastdecode as fd
from hf_fastdecode import api
from hf_fastdecode.assets import embedded_tasks, few_shot_prompt
from hf_fastdecode.cli.app import app
from hf_fastdecode.enabled_loading import enabled_loading

from ..tiny_models import ragged_prompts, tiny_model
from .programs import saved_model
from .recording import recorded
from .training import make_trainer

ROOT = Path(__file__).resolve().parents[2]

REWARDS = """
import gc
from transformers import PreTrainedModel
import hf_fastdecode as fd

def of_length(completions, **_):
    models = [one for one in gc.get_objects() if isinstance(one, PreTrainedModel)]
    last = [fd.explain(one).last_call for one in models if fd.explain(one).enabled]
    print("rollout:", [call.path for call in last if call is not None], flush=True)
    return [float(len(text)) for text in completions]
"""


def test_trl_grpo(tmp_path):
    """The command trains in a process that accelerate starts."""
    shutil.copytree(fd.embedded_folder(), tmp_path / "model")
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"prompt": few_shot_prompt(task, shots=1)}) for task in embedded_tasks()[:2]]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    words = ["--model_name_or_path", "model", "--dataset_name", "data", "--reward_funcs", "rewards.of_length"]
    words += [
        "--output_dir",
        "out",
        "--max_steps",
        "1",
        "--per_device_train_batch_size",
        "4",
        "--num_generations",
        "4",
    ]
    words += ["--max_completion_length", "4", "--use_cpu", "True", "--report_to", "none", "--save_strategy", "no"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path))), "HF_HUB_OFFLINE": "1"}
    environment["HF_HOME"] = str(tmp_path / "home")
    done = subprocess.run(
        [sys.executable, "-m", "hf_fastdecode", "run", "trl", "grpo", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "hf-fastdecode: enabled LlamaForCausalLM" in done.stderr
    assert "rollout: ['shared']" in done.stdout


def test_an_adapter_is_loaded_onto_an_enabled_model(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    base = type(tiny_model()).from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    prompt = ragged_prompts(80)
    with enabled_loading():
        model = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
        model.generate(**prompt, do_sample=True, num_return_sequences=4, max_new_tokens=4)
        assert fd.explain(model).last_call.path == "shared"
    assert not fd.explain(model).enabled


def test_a_callback_in_grpo(tmp_path):
    trainer = make_trainer("grpo", tmp_path, max_steps=1)
    trainer.add_callback(fd.FastDecodeCallback())
    torch.manual_seed(0)
    with recorded(trainer.model) as calls:
        trainer.train()
    assert calls.paths == {"shared"}
    assert not fd.explain(trainer.model).enabled


@pytest.fixture
def run_both(monkeypatch):
    """Runs a command stock, then enabled, with the same seed; returns the paths that the enabled calls took."""
    made, enable_alone = [], api.enable

    def enable(model, **options):
        made.append(held.enter_context(recorded(enable_alone(model, **options))))
        return model

    def run(words):
        for stock in (["--stock"], []):
            torch.manual_seed(0)  # as these programs do not
            with torch.enable_grad():  # lighteval turns gradients off for the rest of the process
                done = CliRunner().invoke(app, ["run", *stock, *words(bool(stock))], catch_exceptions=False)
            assert done.exit_code == 0, done.stderr
            assert ("hf-fastdecode: enabled LlamaForCausalLM" in done.stderr) != bool(stock)
        return set().union(*(calls.paths for calls in made))

    monkeypatch.setattr(api, "enable", enable)
    with ExitStack() as held:
        yield run


def test_evalplus_codegen(tmp_path, monkeypatch, run_both):
    for name in ("appdirs", "fire", "tempdir", "tree_sitter_python", "wget"):
        pytest.importorskip(name, reason="evalplus's command line needs more than its decoder")
    lines = [
        {"task_id": f"HumanEval/{number}", "prompt": few_shot_prompt(task, 2), "entry_point": "none"}
        | dict.fromkeys(("contract", "canonical_solution", "base_input", "plus_input", "atol"), "")
        for number, task in enumerate(embedded_tasks()[:2])
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    # What the environment variable of this name sets when the module is imported.
    monkeypatch.setattr("evalplus.data.humaneval.HUMANEVAL_OVERRIDE_PATH", str(tmp_path / "data.jsonl"))

    def words(stock):
        drawn = ["--n_samples", "4", "--temperature", "0.8", "--root", str(tmp_path / str(stock))]
        model = ["--model", str(fd.embedded_folder()), "--dtype", "float32"]
        return ["evalplus.codegen", "--dataset", "humaneval", "--backend", "hf", *model, *drawn]

    assert run_both(words) == {"shared"}
    stock, shared = ((tmp_path / str(way) / "humaneval").glob("*.raw.jsonl") for way in (True, False))
    assert (texts := next(stock).read_text()).count("\n") == 8
    assert next(shared).read_text() == texts


TASK = """
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc

def prompt(line, task_name=None):
    return Doc(task_name=task_name, query=line["problem"], choices=[line["answer"]], gold_index=0)

TASKS_TABLE = [
    LightevalTaskConfig(
        name="embedded", prompt_function=prompt, hf_repo={folder!r}, hf_subset="default", hf_avail_splits=["train"],
        evaluation_splits=["train"], few_shots_split=None, few_shots_select=None, generation_size=12,
        metrics=[Metrics.avg_at_n_math(sample_params={{"n": 4}})], stop_sequence=["\\n\\n"], version=0,
    )
]
"""
ASK_THE_HUB = ("hle", "mix_eval.main", "mt_bench.main", "tiny_benchmarks")
"""Files of lighteval's own tasks that ask the Hub or a site for data when they are imported, with any task."""


def test_lighteval_accelerate(tmp_path, monkeypatch, run_both):
    for name in ASK_THE_HUB:
        name = f"lighteval.tasks.tasks.{name}"
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    loggers = importlib.import_module("lighteval.logging.info_loggers")
    hashed = loggers.xxhash.xxh64  # takes bytes alone from xxhash 4 on, which lighteval 0.13.0 does not know
    monkeypatch.setattr(loggers, "xxhash", SimpleNamespace(xxh64=lambda text: hashed(text.encode())))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    (tmp_path / "data").mkdir()
    lines = [{"problem": few_shot_prompt(task, 2), "answer": task["code"]} for task in embedded_tasks()[:2]]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "task.py").write_text(TASK.format(folder=str(tmp_path / "data")))
    model = saved_model(tmp_path)

    def words(stock):
        drawn = "batch_size=2,max_length=2048,generation_parameters={temperature:0.8,top_p:0.95}"
        out = ["--output-dir", tmp_path / str(stock), "--save-details", "--custom-tasks", tmp_path / "task.py"]
        arguments = f"model_name={model},dtype=float32,{drawn},cache_dir={tmp_path}/{stock}"
        return ["lighteval", "accelerate", arguments, "embedded|0", *map(str, out)]

    assert run_both(words) == {"shared"}
    texts = [_texts_of_lighteval(tmp_path / str(way)) for way in (True, False)]
    assert [len(samples) for samples in texts[0]] == [4, 4]
    assert texts[0] == texts[1]


def _texts_of_lighteval(folder):
    from pandas import read_parquet

    (details,) = folder.glob("details/**/*.parquet")
    return [list(response["text"]) for response in read_parquet(details)["model_response"]]
