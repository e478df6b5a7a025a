"""A slim checkpoint, as convert-checkpoint writes it, in other programs: the ordinary model's results or a refusal."""

from __future__ import annotations

import json
from typing import Any

import peft
import pytest
import torch
from accelerate import Accelerator, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from datasets import Dataset
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TorchAoConfig
from trl import SFTConfig, SFTTrainer
from typer.testing import CliRunner

import hf_fastdecode as fd
from hf_fastdecode.assets import MODEL_PATH, embedded_tasks, few_shot_prompt
from hf_fastdecode.cli.app import app
from hf_fastdecode.evals.harness import FastDecodeLM

from ..tiny_models import seeded
from .evaluation import evalplus_decoder, evalplus_samples, lm_eval_samples, pipeline_samples
from .models import load
from .test_trl import assert_equal, assert_same_training
from .training import train

quantization = pytest.importorskip("torchao.quantization")
TASKS = embedded_tasks()[:2]
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """The embedded model in fp32 as keys and 32 V-coordinates."""
    found = str(tmp_path_factory.mktemp("slim") / "embedded-slim")
    done = CliRunner().invoke(app, ["convert-checkpoint", "embedded", found, "--dtype", "float32", "--rank", "32"])
    assert done.exit_code == 0, done.output
    return found


@pytest.fixture(scope="module")
def embedded():
    return load("embedded")


@pytest.fixture(scope="module")
def prompt(embedded) -> dict[str, torch.Tensor]:
    return embedded[1](few_shot_prompt(TASKS[0], shots=1), return_tensors="pt")


def slim_model(folder: str, **options: Any):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)


def error(model, prompt, expected) -> float:
    """Of logits, relative."""
    with torch.no_grad():
        return ((model.eval()(**prompt).logits - expected).norm() / expected.norm()).item()


def assert_works(model, prompt, expected) -> None:
    """Its logits are those expected, and samples of the enabled model those of stock."""
    assert error(model, prompt, expected) < 1e-5
    assert_enabled_is_stock(model, prompt)


def assert_enabled_is_stock(model, prompt) -> None:
    stock = seeded(lambda: model.generate(**prompt, **SAMPLING))
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**prompt, **SAMPLING)), stock)
        assert fd.explain(model).last_call.path == "shared", fd.explain(model).last_call.reason


@pytest.fixture(scope="module")
def logits(embedded, prompt) -> torch.Tensor:
    with torch.no_grad():
        return embedded[0](**prompt).logits


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_pipeline(embedded, folder):
    model, tokenizer = slim_model(folder), AutoTokenizer.from_pretrained(folder)
    arguments = {"shots": 1, "samples": 3, "new_tokens": 16}
    expected = pipeline_samples(*embedded, TASKS, **arguments)
    assert pipeline_samples(model, tokenizer, TASKS, **arguments) == expected
    assert pipeline_samples(folder, None, TASKS, **arguments) == expected
    with fd.enabled(model):
        assert pipeline_samples(model, tokenizer, TASKS, **arguments) == expected


def test_lm_eval_generates(folder, tmp_path):
    arguments = {"shots": 1, "batch_size": 2, "new_tokens": 16, "dtype": "float32", "device": "cpu"}
    expected = lm_eval_samples(str(MODEL_PATH), None, TASKS, tmp_path, **arguments)
    assert lm_eval_samples(folder, None, TASKS, tmp_path, **arguments, trust_remote_code=True) == expected


def test_lm_eval_scores(embedded, folder):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    texts = [(few_shot_prompt(task, shots=0), text) for task in TASKS for text in ("return x", "pass")]
    harnesses = (
        HFLM(pretrained=embedded[0], tokenizer=embedded[1], batch_size=2),
        HFLM(pretrained=folder, trust_remote_code=True, batch_size=2, device="cpu"),
        FastDecodeLM(pretrained=folder, batch_size=2, device="cpu"),
    )
    asked = [Instance("loglikelihood", {}, text, 0) for text in texts]
    expected, *found = (harness.loglikelihood(asked, disable_tqdm=True) for harness in harnesses)
    assert fd.explain(harnesses[2].model).enabled
    for one in found:
        assert [greedy for _, greedy in one] == [greedy for _, greedy in expected]
        assert [score for score, _ in one] == pytest.approx([score for score, _ in expected], rel=1e-4)


def test_evalplus(embedded, folder):
    decoder = evalplus_decoder(folder, samples=3, new_tokens=16)
    expected = evalplus_samples(decoder, TASKS[:1], shots=1, samples=3)
    with fd.enabled(decoder.model):
        assert evalplus_samples(decoder, TASKS[:1], shots=1, samples=3) == expected
        assert fd.explain(decoder.model).last_call.path == "shared"


# --- training --------------------------------------------------------------------------------------------------------

SHORT = {"max_steps": 2, "bf16": False, "gradient_checkpointing": False}


@pytest.mark.parametrize("options", [{}, {"beta": 0.04}], ids=["grpo", "grpo-reference"])
def test_grpo_ends_in_the_weights_of_stock(folder, options, tmp_path):
    runs = [
        train("grpo", tmp_path / str(enable), enable=enable, model=slim_model(folder), **SHORT, **options)
        for enable in (False, True)
    ]
    assert_same_training(*runs, rollouts=2)


def test_grpo_of_an_adapter(folder, tmp_path):
    adapter = {"r": 4, "target_modules": ["q_proj", "o_proj"]}
    runs = [
        train(
            *("grpo", tmp_path / str(enable)),
            **{"enable": enable, "model": slim_model(folder), "peft_config": peft.LoraConfig(**adapter), **SHORT},
        )
        for enable in (False, True)
    ]
    assert_same_training(*runs, rollouts=2)


@pytest.mark.parametrize(
    "options", [{}, {"packing": True, "max_length": 128}, {"padding_free": True, "max_length": None}], ids=str
)
def test_supervised_training(folder, embedded, options, tmp_path):
    """The first loss is the ordinary model's, also where positions begin anew within a row."""
    losses = []
    for model in (fd.load_embedded()[0], folder):
        arguments = SFTConfig(
            **{"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", "save_strategy": "no"},
            **{"logging_steps": 1, "learning_rate": 1e-3, "disable_tqdm": True, **SHORT, **options},
        )
        texts = Dataset.from_dict({"text": [few_shot_prompt(task, shots=0) for task in embedded_tasks()[:12]]})
        trainer = SFTTrainer(model=model, args=arguments, train_dataset=texts, processing_class=embedded[1])
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-5)
    assert losses[1][1] != losses[1][0]


def test_a_trained_model_becomes_an_ordinary_one(folder, prompt, tmp_path):
    trainer = train("grpo", tmp_path, enable=False, model=slim_model(folder), **SHORT).trainer
    trainer.save_model(tmp_path / "slim")
    words = ["convert-checkpoint", str(tmp_path / "slim"), str(tmp_path / "full"), "--format", "full"]
    assert CliRunner().invoke(app, words).exit_code == 0
    full = AutoModelForCausalLM.from_pretrained(tmp_path / "full")
    with torch.no_grad():
        expected = trainer.model.eval()(**prompt).logits
    assert error(full, prompt, expected) < 1e-5
    assert json.loads((tmp_path / "full" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


# --- adapters --------------------------------------------------------------------------------------------------------


def adapted(model, modules):
    torch.manual_seed(3)
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=16, target_modules=modules)).eval()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    return found


def test_an_adapter_of_the_ordinary_model_acts_alike(folder, prompt, tmp_path):
    ordinary = adapted(fd.load_embedded()[0], ["q_proj", "o_proj", "up_proj"])
    ordinary.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = ordinary(**prompt).logits
    model = peft.PeftModel.from_pretrained(slim_model(folder), tmp_path).eval()
    assert_works(model, prompt, expected)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    assert_works(slim_model(tmp_path / "merged"), prompt, expected)


@pytest.mark.parametrize("modules", [["k_proj"], ["q_proj", "k_proj", "v_proj"]], ids=str)
def test_adapters_of_keys_are_refused(folder, modules, tmp_path):
    with pytest.raises(ValueError, match=r"KeyProjection.* is not supported"):
        adapted(slim_model(folder), modules)
    adapted(fd.load_embedded()[0], modules).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"KeyProjection.* is not supported"):
        peft.PeftModel.from_pretrained(slim_model(folder), tmp_path)


def test_an_adapter_of_all_linear_layers_leaves_the_keys(folder, prompt):
    model = adapted(slim_model(folder), "all-linear")
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name in model.state_dict() if ".lora_" in name}
    assert layers == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert_enabled_is_stock(model, prompt)


# --- accelerate ------------------------------------------------------------------------------------------------------


def test_layers_on_disk(folder, prompt, logits, tmp_path):
    places = {f"model.layers.{index}": "disk" if index % 2 else "cpu" for index in range(4)}
    places |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    assert_works(slim_model(folder, device_map=places, offload_folder=tmp_path / "some"), prompt, logits)
    all_away = slim_model(folder)
    disk_offload(all_away, tmp_path / "all", execution_device=torch.device("cpu"))
    assert_works(all_away, prompt, logits)


def test_a_checkpoint_is_dispatched(folder, prompt, logits):
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.tie_weights()
    kinds = list(model._no_split_modules)
    assert_works(load_checkpoint_and_dispatch(model, folder, "auto", no_split_module_classes=kinds), prompt, logits)


def test_a_prepared_model_trains(folder, prompt, logits, tmp_path):
    accelerator = Accelerator(cpu=True)
    model = slim_model(folder)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    assert_works(model, prompt, logits)
    accelerator.backward(model.train()(**prompt, labels=prompt["input_ids"]).loss)
    optimizer.step()
    accelerator.unwrap_model(model).save_pretrained(tmp_path)
    assert error(model, prompt, logits) > 1e-3
    assert_equal(
        dict(slim_model(tmp_path).named_parameters()), dict(accelerator.unwrap_model(model).named_parameters())
    )


# --- torchao ---------------------------------------------------------------------------------------------------------


def ordinary_error(prompt, logits) -> float:
    model, _ = fd.load_embedded()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return error(model, prompt, logits)


def test_int8_weights(folder, prompt, logits):
    bound = 1.5 * ordinary_error(prompt, logits)
    config = quantization.Int8WeightOnlyConfig()
    model = slim_model(folder)
    quantization.quantize_(model, config)
    loaded = slim_model(folder, quantization_config=TorchAoConfig(config))
    for one in (model, loaded):
        assert type(one.model.layers[0].self_attn.q_proj.weight) is not nn.Parameter
        assert 0 < error(one, prompt, logits) < bound
        assert_enabled_is_stock(one, prompt)


def test_int8_weights_beside_keys_alone(embedded, prompt, logits):
    """Weights of keys keep their precision: in 8 bits they would cost 30 times the ordinary model's error."""
    model = fd.to_slim(embedded[0], torch.arange(3, 67), plan="k")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].self_attn.k_proj.weight) is nn.Parameter
    assert 0 < error(model, prompt, logits) < 1.5 * ordinary_error(prompt, logits)


def test_quantized_models_are_not_converted(embedded):
    model, tokenizer = fd.load_embedded()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(ValueError, match=r"weight is of type Int8Tensor, .*; convert the model first"):
        fd.to_slim(model, tokenizer=tokenizer)
