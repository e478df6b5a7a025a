"""GRPO of a mixture of experts whose updates route as the rollouts did, as docs/rl.md shows it."""

from __future__ import annotations

import peft
import pytest

from .. import tiny_models
from .scored_training import STEPS, train_scored
from .test_shared_forward import CHECKPOINTING, LORA
from .training import rollout_of_page

EXPERTS = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
ALONE = {"router_aux_loss_coef": 0.0}


@pytest.mark.parametrize(
    ("options", "path"),
    [
        pytest.param({**ALONE, "num_iterations": 2, "steps_per_generation": 2}, "shared", id="two-iterations"),
        pytest.param({**ALONE, "lora": True, **CHECKPOINTING}, "shared", id="lora-checkpointed"),
        pytest.param({"router_aux_loss_coef": 0.01}, "stock", id="aux-loss"),  # but for passes without a loss
    ],
)
def test_updates_route_as_the_rollouts_did(options, path, tmp_path, monkeypatch):
    monkeypatch.setitem(tiny_models.ARCHITECTURES, "qwen3_moe", ("qwen3_moe", EXPERTS))
    options = {"model": "qwen3_moe", **options}
    if options.pop("lora", False):
        options["peft_config"] = peft.LoraConfig(**LORA)
    options |= {"enable": {"log_probs": "trainer"}, "rollout_func": rollout_of_page()}
    plain = train_scored("grpo", tmp_path, **options)
    replayed = train_scored("grpo", tmp_path, generation_kwargs={"output_router_choices": True}, **options)
    assert plain.tokens[:4] == replayed.tokens[:4]
    assert len(replayed.metrics) == STEPS + 1
    assert replayed.metrics[0]["loss"] == pytest.approx(plain.metrics[0]["loss"], abs=1e-6)
    assert all(one.replayed for one in replayed.passes)
    assert {one.path for one in replayed.passes} == {"shared", path}
    assert not any(one.replayed for one in plain.passes)
