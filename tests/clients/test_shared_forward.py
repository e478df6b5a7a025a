"""Trainers and lm-eval, unmodified: passes of an enabled model compute shared tokens once, with stock's results."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import Tensor

import hf_fastdecode as fd
from hf_fastdecode.generation.report import ForwardReport

from .evaluation import lm_eval_scores
from .models import load
from .recording import recorded_passes
from .scored_training import STEPS, train_scored

# Random in both factors: zeros leave nothing that parameters are relative to, and the reference is the policy.
LORA = {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
OFF_POLICY = {"num_iterations": 2, "steps_per_generation": 2, "beta": 0.04}


@pytest.mark.parametrize(
    ("name", "options", "least"),
    [
        pytest.param("grpo", {}, 2, id="grpo"),
        pytest.param("grpo", {**OFF_POLICY, **CHECKPOINTING}, 2, id="grpo-reference-two-iterations"),
        pytest.param("grpo", {"lora": True, **OFF_POLICY, **REENTRANT}, 2, id="grpo-lora"),
        pytest.param("grpo", {"model": "gpt_oss", "router_aux_loss_coef": 0.0, **CHECKPOINTING}, 2, id="grpo-gpt-oss"),
        pytest.param("rloo", REENTRANT, 2, id="rloo"),
        pytest.param("dpo", {}, 1.2, id="dpo"),
        pytest.param("dpo", {"lora": True, **CHECKPOINTING}, 1.2, id="dpo-lora"),
        pytest.param("kto", REENTRANT, 1.2, id="kto"),
        pytest.param("orpo", {}, 1.2, id="orpo"),
        pytest.param("reward", CHECKPOINTING, 1.2, id="reward"),
    ],
)
def test_training_is_that_of_stock(name, options, least, tmp_path):
    options = dict(options)
    adapter = peft.LoraConfig(**LORA) if options.pop("lora", False) else None
    stock, enabled = (
        train_scored(name, tmp_path, enable=enable, peft_config=adapter, **options) for enable in (False, True)
    )
    assert stock.tokens == enabled.tokens
    assert len(stock.metrics) == len(enabled.metrics) == STEPS + 1
    for expected, found in zip(stock.metrics, enabled.metrics, strict=True):
        # ORPO's means of logits count those of padding, whose hidden states are 0 in passes that share.
        for key in ("logits/chosen", "logits/rejected") if name == "orpo" else ():
            found.pop(key, expected.pop(key, None))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert not stock.passes
    assert shared_tokens(enabled.passes) > least
    assert difference(stock.parameters, enabled.parameters) <= 1e-5
    assert difference(stock.parameters, stock.start) > 1e-3


def difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The largest difference of any tensor's elements, relative to its largest element."""
    return max(((value - found[name]).abs().max() / value.abs().max()).item() for name, value in expected.items())


def shared_tokens(passes: list[ForwardReport]) -> float:
    """By how much fewer tokens were computed than given, in passes that all shared."""
    assert {one.path for one in passes} == {"shared"}, {one.reason for one in passes}
    return sum(one.tokens for one in passes) / sum(one.computed for one in passes)


@pytest.mark.parametrize("rolling", [False, True], ids=["multiple-choice", "rolling"])
def test_lm_eval_scores_are_those_of_stock(rolling, tmp_path):
    model, tokenizer = load("embedded")
    sizes = {"problems": 3, "shots": 0 if rolling else 5, "batch_size": 4, "rolling": rolling}
    expected, samples = lm_eval_scores(model, tokenizer, tmp_path, **sizes)
    computed = {}
    for reuse in (False, True):
        with fd.enabled(model, reuse_prefix=reuse), recorded_passes() as passes:
            scores, found = lm_eval_scores(model, tokenizer, tmp_path, **sizes)
            assert fd.explain(model).last_forward is passes[-1]
        assert digits(scores) == digits(expected)
        assert torch.tensor(found).allclose(torch.tensor(samples), rtol=1e-5)
        computed[reuse] = sum(one.computed for one in passes)
        given = sum(one.tokens for one in passes)
    if rolling:  # texts begin with the same few words, which do not pay
        assert computed[False] == given
    else:
        assert computed[False] < given / 2
        assert computed[True] < given / 4


def digits(scores: dict[str, float]) -> dict[str, str]:
    """Scores as lm-eval prints them."""
    return {name: f"{value:.4f}" for name, value in scores.items()}
