"""A callback of transformers' Trainer: its model is enabled while it trains."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_fastdecode as fd

from .fresh_processes import run_fresh
from .tiny_models import ragged_prompts, tiny_model

PROMPT = ragged_prompts(80)
ROWS = [{"input_ids": ids, "labels": ids} for ids in torch.arange(3, 11).view(2, 4)]


class Draws(TrainerCallback):
    """Generates at each step's end, as reinforcement learning does."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model, **kwargs):
        model.generate(**PROMPT, max_new_tokens=2, num_return_sequences=4, do_sample=True)
        self.seen.append(fd.explain(model).last_call and fd.explain(model).last_call.path)


def train(model, callback, folder, *others):
    draws = Draws()
    arguments = TrainingArguments(folder, use_cpu=True, max_steps=2, report_to="none", save_strategy="no")
    Trainer(model=model, args=arguments, train_dataset=ROWS, callbacks=[callback, draws, *others]).train()
    return draws.seen


def test_a_model_is_enabled_while_it_trains(tmp_path):
    model = tiny_model()
    before = dict(vars(model))
    callback = fd.FastDecodeCallback(min_saved_tokens=1)
    for _ in range(2):
        assert train(model, callback, tmp_path) == ["shared", "shared"]
        assert not fd.explain(model).enabled
        assert "generate" not in vars(model)
        assert before.keys() - {"training"} <= vars(model).keys()


def test_an_enabled_model_keeps_its_options_and_stays_enabled(tmp_path):
    model = fd.enable(tiny_model(), min_saved_tokens=1 << 20)
    assert train(model, fd.FastDecodeCallback(), tmp_path) == ["stock", "stock"]
    assert fd.explain(model).enabled


def test_training_again_after_an_error(tmp_path):
    """The model, which stays enabled by an error, is disabled at the end."""

    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    model, callback = tiny_model(), fd.FastDecodeCallback(min_saved_tokens=1)
    with pytest.raises(KeyboardInterrupt):
        train(model, callback, tmp_path, Fails())
    assert train(model, callback, tmp_path) == ["shared", "shared"]
    assert not fd.explain(model).enabled


def test_options_are_checked_before_training():
    with pytest.raises(ValueError, match="mode must be one of"):
        fd.FastDecodeCallback(mode="fast")


def test_the_package_does_not_import_the_trainer():
    code = "import json, sys, hf_fastdecode as fd\nfd.enable\nprint(json.dumps([*sys.modules]))"
    done = run_fresh(code)
    assert done.returncode == 0, done.stderr
    assert "hf_fastdecode.trainer_callback" not in json.loads(done.stdout)
