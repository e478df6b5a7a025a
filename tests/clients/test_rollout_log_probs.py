"""GRPO with a rollout function that returns a trainer's log-probabilities, as docs/rl.md shows it."""

from __future__ import annotations

import peft
import pytest
from trl import GRPOTrainer

from .scored_training import STEPS, train_scored
from .test_shared_forward import CHECKPOINTING, LORA, difference
from .training import rollout_of_page

TWICE = {"num_iterations": 2, "steps_per_generation": 2, "temperature": 0.8}


@pytest.fixture
def scored(monkeypatch):
    """What the trainer makes of each rollout."""
    found, score = [], GRPOTrainer._generate_and_score_completions

    def recorded(self, inputs):
        found.append(score(self, inputs))
        return found[-1]

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", recorded)
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(TWICE, id="two-iterations"),
        pytest.param({**TWICE, **CHECKPOINTING, "off_policy_mask_threshold": 0.1}, id="masked-off-policy"),
        pytest.param({**TWICE, "lora": True}, id="lora"),
        pytest.param({**TWICE, "model": "gpt_oss", "router_aux_loss_coef": 0.0}, id="gpt-oss"),
    ],
)
def test_losses_are_those_of_stock(options, scored, tmp_path):
    options = dict(options)
    adapter = peft.LoraConfig(**LORA) if options.pop("lora", False) else None
    stock = train_scored("grpo", tmp_path, enable=False, peft_config=adapter, **options)
    scored.clear()
    enabled = train_scored(
        "grpo",
        tmp_path,
        enable={"log_probs": "trainer"},
        peft_config=adapter,
        rollout_func=rollout_of_page(),
        **options,
    )
    assert stock.tokens == enabled.tokens
    assert len(stock.metrics) == len(enabled.metrics) == STEPS + 1
    for expected, found in zip(stock.metrics, enabled.metrics, strict=True):
        for name in expected.keys() & {"loss", "train_loss"}:
            assert found[name] == pytest.approx(expected[name], abs=1e-6)
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert difference(stock.parameters, enabled.parameters) <= 1e-5
    given = [one for one in enabled.passes if one.reason == "the last pass computed these rows"]
    assert {one.computed for one in given} == {0}
    assert len(given) == 2 * len(scored)  # two mini-batches of each rollout
    for one in scored:
        kept = one["completion_mask"] > 0
        old, drawn = (one[name][kept] for name in ("old_per_token_logps", "sampling_per_token_logps"))
        assert (old - drawn).abs().max() < 1e-6


@pytest.mark.parametrize(("enable", "remedy"), [(True, 'with log_probs="trainer"'), (False, r"enable\(model\)")])
def test_a_rollout_without_them_says_what_to_do(enable, remedy, tmp_path):
    with pytest.raises(ValueError, match=remedy):
        train_scored("grpo", tmp_path, enable=enable, rollout_func=rollout_of_page())
