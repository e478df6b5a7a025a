"""Programs that are started from a command line: `hf-fastdecode run`, and a callback of transformers' trainer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import peft
import torch

import hf_fastdecode as fd
from hf_fastdecode.assets import embedded_tasks, few_shot_prompt
from hf_fastdecode.enabled_loading import enabled_loading

from ..tiny_models import ragged_prompts, tiny_model
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
