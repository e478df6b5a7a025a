"""The command line with models that need further packages: an adapter's folder, as PEFT saves it."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_fastdecode as fd
from hf_fastdecode.cli.app import app
from hf_fastdecode.evals.harness import FastDecodeLM

from .programs import Work, save_adapter, saved_model

PROMPT = Work().prompts[0]


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def greedy(model) -> str:
    tokenizer = fd.load_embedded()[1]
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs.input_ids.shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_every_command_that_draws_takes_an_adapter(tmp_path):
    adapter, base = save_adapter(tmp_path)
    expected = greedy(AutoModelForCausalLM.from_pretrained(adapter))
    assert expected != greedy(AutoModelForCausalLM.from_pretrained(base))
    words = ("--prompt", PROMPT, "--greedy", "--max-new-tokens", 8, "--json")
    assert json.loads(run("generate", "--model", adapter, *words))["text"] == expected
    run("eval", "run", "--model", adapter, "--limit", 1, "--n", 2, "--latency", 0, "--out", tmp_path / "run")
    drawn = ("--point", "64x2", "--new-tokens", 2, "--repeats", 1)
    assert "enabled" in run("bench", "--model", adapter, *drawn, "--out", tmp_path / "rows.csv")


def test_lm_eval_takes_an_adapter_and_a_multimodal_model(tmp_path):
    from ..cli.test_models import save_multimodal

    adapter, _ = save_adapter(tmp_path)
    ids = torch.randint(5, 400, (1, 20))
    expected = AutoModelForCausalLM.from_pretrained(adapter)(ids).logits
    harness = FastDecodeLM(str(adapter), batch_size=1, device="cpu", dtype="fp32")
    torch.testing.assert_close(harness.model(ids).logits, expected)
    assert fd.explain(harness.model).enabled
    folder = save_multimodal("mistral3", tmp_path / "multimodal")
    harness = FastDecodeLM(str(folder), batch_size=1, device="cpu", dtype="bf16")
    assert harness.model.config.model_type == "mistral3"
    assert harness.model.dtype == torch.bfloat16


def test_quantized_weights_are_made_where_they_run(tmp_path):
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    base = saved_model(tmp_path)
    form = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=form, device_map="cpu")
    model.save_pretrained(tmp_path / "quantized")
    fd.load_embedded()[1].save_pretrained(tmp_path / "quantized")
    words = ("--prompt", PROMPT, "--greedy", "--max-new-tokens", 8, "--json")
    assert json.loads(run("generate", "--model", tmp_path / "quantized", *words))["text"] == greedy(model)
