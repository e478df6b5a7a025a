"""TRL's trainers, unmodified: rollouts of an enabled model are shared, and training ends in stock's weights."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import hf_fastdecode as fd

from ..tiny_models import seeded
from .training import SAMPLES, Run, make_trainer, train

LORA = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def assert_same_training(stock: Run, enabled: Run, rollouts: int = 3) -> None:
    """Every rollout was shared, and the weights, which moved, are stock's to the bit."""
    assert len(stock.calls.made) == len(enabled.calls.made) == rollouts
    assert enabled.calls.paths == {"shared"}, [call.reason for call in enabled.calls.made]
    assert enabled.calls.prefilled_tokens < stock.calls.prefilled_tokens
    assert_equal(stock.parameters, enabled.parameters)
    assert any(not torch.equal(value, enabled.start[name]) for name, value in enabled.parameters.items())


def assert_equal(stock: dict[str, Tensor], enabled: dict[str, Tensor]) -> None:
    """Every tensor is the same to the bit."""
    assert stock.keys() == enabled.keys()
    assert not [name for name, value in stock.items() if not torch.equal(value, enabled[name])]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("grpo", {}, id="grpo"),  # fp32 weights, bf16=True, gradient checkpointing
        pytest.param("grpo", {"num_iterations": 2, "disable_dropout": True}, id="grpo-two-iterations-no-dropout"),
        pytest.param("grpo", {"bf16": False, "gradient_checkpointing": False}, id="grpo-fp32"),
        pytest.param("grpo", {"images": True, "bf16": False, "gradient_checkpointing": False}, id="grpo-images"),
        pytest.param("rloo", {}, id="rloo"),
        # It draws for all prompts, then for all of them again, so what is shared is what different prompts begin with.
        pytest.param("online-dpo", {"gradient_checkpointing": False, "shots": 1}, id="online-dpo"),
    ],
)
def test_training_ends_in_the_weights_of_stock(name, options, tmp_path):
    stock = train(name, tmp_path / "stock", enable=False, **options)
    enabled = train(name, tmp_path / "enabled", enable=True, **options)
    assert_same_training(stock, enabled, rollouts=2 if options.get("num_iterations") == 2 else 3)


def test_training_a_hybrid_ends_in_the_weights_of_stock(tmp_path):
    _, tokenizer = fd.load_embedded()
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,  # the last attends, the others are gated delta nets
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    # A trainer turns the cache of a model off; a generation config that was never saved follows it.
    options = {"bf16": False, "gradient_checkpointing": False, "generation_kwargs": {"use_cache": True}}
    stock, enabled = (
        train(
            "grpo", tmp_path / str(enable), enable=enable, model=seeded(lambda: Qwen3_5ForCausalLM(config)), **options
        )
        for enable in (False, True)
    )
    assert_same_training(stock, enabled)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("grpo", {"gradient_checkpointing": True}, id="grpo-checkpointing"),
        pytest.param("grpo", {"images": True, "bf16": False, "gradient_checkpointing": False}, id="grpo-images"),
        pytest.param("grpo", {"num_iterations": 2, "beta": 0.04}, id="grpo-two-iterations-reference"),
        pytest.param("rloo", {"gradient_checkpointing": False}, id="rloo"),
    ],
)
def test_training_an_adapter_ends_in_the_weights_of_stock(name, options, tmp_path):
    runs = [
        train(name, tmp_path / str(enable), enable=enable, peft_config=peft.LoraConfig(**LORA), **options)
        for enable in (False, True)
    ]
    assert_same_training(*runs, rollouts=2 if options.get("num_iterations") == 2 else 3)


def test_dropout_of_an_adapter_runs_stock_until_the_trainer_disables_it(tmp_path):
    adapter = peft.LoraConfig(**LORA, lora_dropout=0.1)
    options = {"max_steps": 1, "peft_config": adapter, "bf16": False, "gradient_checkpointing": False}
    noisy = train("grpo", tmp_path, enable=True, **options)
    (call,) = noisy.calls.made
    assert call.path == "stock"
    assert "dropout" in call.reason
    quiet = train("grpo", tmp_path, enable=True, disable_dropout=True, **options)
    assert quiet.calls.paths == {"shared"}


def test_online_dpo_turns_the_cache_off_with_gradient_checkpointing(tmp_path):
    options = {"max_steps": 1, "bf16": False, "shots": 1}
    default = train("online-dpo", tmp_path, enable=True, **options)
    (call,) = default.calls.made
    assert (call.path, call.reason) == ("stock", "use_cache=False; pass use_cache=True")
    cached = train("online-dpo", tmp_path, enable=True, generation_kwargs={"use_cache": True}, **options)
    assert cached.calls.paths == {"shared"}


def test_a_checkpoint_is_that_of_stock_and_resumes_as_it_does(tmp_path):
    options = {"bf16": False, "gradient_checkpointing": False, "save_strategy": "steps", "save_steps": 2}
    runs, resumed = {}, {}
    for enable in (False, True):
        runs[enable] = train("grpo", tmp_path / str(enable), enable=enable, **options)
        runs[enable].trainer.save_model(tmp_path / f"saved-{enable}")
        # From the other's checkpoint: what an enabled model saves is an ordinary one.
        checkpoint = tmp_path / str(enable) / "checkpoint-2"
        resumed[enable] = train("grpo", tmp_path / "resumed", enable=not enable, resume=checkpoint, **options)
    saved = [_files(tmp_path / f"saved-{enable}") for enable in (False, True)]
    assert saved[0] == saved[1]
    for enable in (False, True):
        assert_equal(runs[False].parameters, resumed[enable].parameters)
    assert resumed[False].calls.paths == {"shared"}
    loaded = type(fd.load_embedded()[0]).from_pretrained(tmp_path / "saved-True")
    assert_equal(runs[False].parameters, dict(loaded.named_parameters()))
    assert not fd.explain(loaded).enabled


def _files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "training_args.bin"}


def test_a_rollout_uses_the_weights_of_the_step_before(tmp_path):
    trainer = make_trainer("grpo", tmp_path, bf16=False, gradient_checkpointing=False)
    fd.enable(trainer.model)
    seen = []

    def generate(*args, inner=trainer.model.generate, **kwargs):
        fresh = type(trainer.model)(trainer.model.config).train()
        fresh.load_state_dict(trainer.model.state_dict())
        fresh.generation_config = trainer.model.generation_config
        ours, theirs = (seeded(lambda run=run: run(*args, **kwargs)) for run in (inner, fresh.generate))
        seen.append((ours, theirs))
        return ours

    trainer.model.generate = generate
    trainer.train()
    assert len(seen) == 3
    for ours, theirs in seen:
        assert ours.shape[0] == SAMPLES
        assert torch.equal(ours, theirs)
