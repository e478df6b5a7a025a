"""Passes in which routers choose what rows have chosen in `generate` (`replay_routing`)."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import hf_fastdecode as fd

from ..generation.routing_models import FAMILIES, WIDTH, chosen_in, mixture, routers_in, rows_of, sampled
from ..tiny_models import tiny_model
from .comparison import checkpoint

SHARES = pytest.mark.parametrize("share", [True, False], ids=["shared", "stock"])


def rollout(family="qwen3_moe", *, perturbed=False, **options):
    """An enabled model, rows and their choices; the model's routers are others afterwards if asked for."""
    model = fd.enable(mixture(family), min_saved_tokens=1, **options)
    output = sampled(model)
    if perturbed:
        torch.manual_seed(1)
        for router in routers_in(model):
            nn.init.normal_(router.weight, std=0.15)
    return model, rows_of(output.sequences), output.router_choices


def scored(model, rows, choices, **arguments):
    with fd.replay_routing(model, choices):
        return model(**rows, **arguments).logits


def reference(router, x, chosen, family):
    """Weights of given experts, from a router's logits of now."""
    logits = (x @ router.weight.T).float() + (router.bias if family == "gpt_oss" else 0)
    if family == "gpt_oss":
        return logits.gather(1, chosen).softmax(-1)
    if family == "deepseek_v3":
        weights = logits.sigmoid().gather(1, chosen)
        return router.routed_scaling_factor * weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = logits.softmax(-1).gather(1, chosen)
    if family == "deepseek_v2":
        return weights * router.routed_scaling_factor
    return weights / weights.sum(-1, keepdim=True)


def gradients_of(model, logits, rows):
    """Of all parameters, of a loss over the tokens after prompts."""
    model.zero_grad()
    shown = rows["attention_mask"][:, WIDTH:] > 0
    tokens = rows["input_ids"][:, WIDTH:, None]
    logits[:, WIDTH - 1 : -1].log_softmax(-1).gather(2, tokens)[..., 0][shown].sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@SHARES
@pytest.mark.parametrize("family", FAMILIES)
def test_own_choices_change_no_bit(family, share):
    model, rows, choices = rollout(family, share_forward=share)
    plain = model(**rows)
    before = fd.explain(model).last_forward
    replayed = scored(model, rows, choices)
    report = fd.explain(model).last_forward
    assert torch.equal(replayed, plain.logits)
    assert (report.path, report.computed) == (before.path, before.computed)
    assert report.replayed == sum(len(row.ids) - 1 for row in choices.rows)
    assert f"routing of {report.replayed} tokens replayed" in str(report)


@SHARES
@pytest.mark.parametrize("family", FAMILIES)
def test_given_experts_get_weights_and_gradients_of_now(family, share):
    """Those of a reference, in whose routers other weights would choose otherwise."""
    model, rows, choices = rollout(family, perturbed=True, share_forward=share)
    twin = fd.disable(copy.deepcopy(model))
    own = chosen_in(twin, rows)
    given = own.clone()
    for row, mask in enumerate(rows["attention_mask"] > 0):
        given[row, mask.nonzero()[:-1, 0]] = choices.of_row(row).long()
    assert (own.sort(-1)[0] != given.sort(-1)[0]).float().mean() > 0.2
    for layer, router in enumerate(routers_in(twin)):
        chosen = given[:, :, layer].flatten(0, 1)

        def forward(x, router=router, chosen=chosen):
            x = x.reshape(-1, x.shape[-1])
            return x @ router.weight.T, reference(router, x, chosen, family), chosen

        router.forward = forward
    expected = gradients_of(twin, twin(**rows).logits, rows)
    found = gradients_of(model, scored(model, rows, choices), rows)
    assert expected.keys() == found.keys()
    assert any("gate.weight" in name or "router.weight" in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name)


@SHARES
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_choose_the_same_again(share, reentrant):
    """Although the context has ended when they are computed again."""
    model, rows, choices = rollout(perturbed=True, share_forward=share)
    model.train()
    expected = gradients_of(model, scored(model, rows, choices, use_cache=False), rows)
    checkpoint(model, use_reentrant=reentrant)
    found = gradients_of(model, scored(model, rows, choices, use_cache=False), rows)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@SHARES
def test_rows_may_be_shuffled_cut_and_padded(share):
    model, rows, choices = rollout(perturbed=True, share_forward=share)
    expected = scored(model, rows, choices)
    order = torch.tensor([4, 0, 2])
    some = {name: torch.nn.functional.pad(one[order], (0, 5)) for name, one in rows.items()}
    for given in (choices, choices[order]):
        found = scored(model, some, given)[:, :-5]
        shown = some["attention_mask"][:, :-5] > 0
        torch.testing.assert_close(found[shown], expected[order][shown], rtol=0, atol=1e-5)
    prompts = {name: one[:, :WIDTH] for name, one in rows.items()}
    found = scored(model, prompts, choices)
    shown = prompts["attention_mask"] > 0
    torch.testing.assert_close(found[shown], expected[:, :WIDTH][shown], rtol=0, atol=1e-5)


def test_equal_tokens_with_other_choices_are_not_shared():
    """Of two rows of one text the second has chosen other experts for the tokens after its fortieth."""
    model, rows, choices = rollout(perturbed=True)
    rows = {name: one[[0, 0]] for name, one in rows.items()}
    row, stored = choices.rows[0], choices.stored
    later = (torch.arange(len(row.tokens)) >= 40).numpy() & (row.tokens >= 0)
    other = row._replace(tokens=row.tokens + len(stored) * later)
    given = replace(choices, stored=torch.cat([stored, (stored + 1) % 8]), rows=(row, other))
    found = scored(model, rows, given)
    report = fd.explain(model).last_forward
    assert (report.path, report.computed) == ("shared", 2 * len(row.ids) - 40)
    fd.enable(model, share_forward=False)
    expected = scored(model, rows, given)
    assert (expected[0] - expected[1]).abs().max() > 0.01
    shown = rows["attention_mask"] > 0
    torch.testing.assert_close(found[shown], expected[shown], rtol=0, atol=1e-5)


def test_log_probabilities_of_a_rollout_are_those_of_replayed_routing():
    model = fd.enable(mixture(), min_saved_tokens=1, log_probs="trainer")
    output = sampled(model)
    assert fd.explain(model).last_forward.replayed
    rows = rows_of(output.sequences)
    with torch.no_grad():
        logits = scored(model, rows, output.router_choices)[:, WIDTH - 1 : -1].log_softmax(-1)
        plain = model(**rows).logits
    assert fd.explain(model).last_forward.reason == "rows begin alike"  # not what a pass with choices has kept
    found = logits.gather(2, rows["input_ids"][:, WIDTH:, None])[..., 0]
    assert torch.equal(output.logprobs, found.where(rows["attention_mask"][:, WIDTH:] > 0, 0.0))
    assert plain.shape[0] == len(found)


def test_it_lasts_until_another_call_or_the_end_of_a_block():
    model, rows, choices = rollout(perturbed=True)
    plain = model(**rows).logits
    fd.replay_routing(model, choices)
    with fd.replay_routing(model, None):
        assert torch.equal(model(**rows).logits, plain)
    replayed = model(**rows).logits
    assert not torch.equal(replayed, plain)
    with pytest.raises(RuntimeError), fd.replay_routing(model, choices[:2]):
        raise RuntimeError
    assert torch.equal(model(**rows).logits, replayed)
    fd.enable(model, log_probs="trainer")
    output = sampled(model, output_router_choices=False)  # whose passes choose as ever, also the one over its rows
    assert not torch.equal(output.sequences, rows["input_ids"])
    assert not fd.explain(model).last_forward.replayed
    fd.disable(fd.enable(model))
    assert torch.equal(fd.enable(model, min_saved_tokens=1)(**rows).logits, plain)


def test_a_block_is_entered_again():
    """As often as wanted, also within itself and after other calls, which are as before at its end."""
    model, rows, choices = rollout(perturbed=True)
    plain = model(**rows).logits
    replay = fd.replay_routing(model, choices)
    for _ in range(2):
        with replay:
            replayed = model(**rows).logits
            with replay:
                assert torch.equal(model(**rows).logits, replayed)
            assert torch.equal(model(**rows).logits, replayed)
        assert not torch.equal(replayed, plain)
        assert torch.equal(model(**rows).logits, plain)
    replay = fd.replay_routing(model, None)
    fd.replay_routing(model, choices)
    with replay:
        assert torch.equal(model(**rows).logits, plain)
    assert torch.equal(model(**rows).logits, replayed)
    fd.disable(model)
    with pytest.raises(ValueError, match="needs an enabled Qwen3MoeForCausalLM"), replay:
        pass


def test_copies_of_a_model_replay_nothing():
    model, rows, choices = rollout(perturbed=True)
    plain = model(**rows).logits
    with fd.replay_routing(model, choices):
        twin = copy.deepcopy(model)
        assert torch.equal(twin(**rows).logits, plain)
        assert not torch.equal(model(**rows).logits, plain)
    assert fd.explain(twin).last_forward.path == "shared"


def test_caches_that_a_pass_returns_are_of_the_given_experts():
    model, rows, choices = rollout(perturbed=True)
    with fd.replay_routing(model, choices):
        found = model(**rows, use_cache=True)
    fd.enable(model, share_forward=False)
    with fd.replay_routing(model, choices):
        expected = model(**rows, use_cache=True)
    layers = zip(found.past_key_values.layers, expected.past_key_values.layers, strict=True)
    shown = rows["attention_mask"] > 0
    for one, other in layers:
        torch.testing.assert_close(
            one.keys.transpose(1, 2)[shown], other.keys.transpose(1, 2)[shown], rtol=0, atol=1e-5
        )


def test_what_cannot_be_replayed_is_refused():
    model, rows, choices = rollout()
    other = {**rows, "input_ids": rows["input_ids"].flip(1)}
    with pytest.raises(ValueError, match=r"row 0 of the pass .* none of 6 recorded rows begins; give an att.*mask"):
        scored(model, other, choices)
    longer = {name: torch.nn.functional.pad(one[:, :WIDTH], (0, 40), value=1) for name, one in rows.items()}
    with pytest.raises(ValueError, match="none of 2 recorded rows"):
        scored(model, longer, choices[:2])
    with pytest.raises(ValueError, match="the pass has inputs_embeds; pass input_ids"):
        scored(model, {"inputs_embeds": torch.zeros(2, 3, 64, requires_grad=True)}, choices)
    with pytest.raises(TypeError, match=r"got Tensor; give router_choices"):
        fd.replay_routing(model, choices.of_row(0))
    with pytest.raises(ValueError, match="2 layers of experts, and the choices are of 3"):
        fd.replay_routing(model, replace(choices, experts=(8, 8, 8)))
    with pytest.raises(ValueError, match=r"chooses 2 of 8 experts .* given 2 of 9"):
        scored(model, rows, replace(choices, experts=(9, 9)))
    for stored in (choices.stored.float(), choices.stored + 8, choices.stored.short() - 8, choices.stored[0]):
        with pytest.raises(ValueError, match=r"stored must be experts .* from 0 to 7"):
            fd.replay_routing(model, replace(choices, stored=stored))
    with pytest.raises(ValueError, match="is a mixtral model, and the choices are of a qwen3_moe model; use its own"):
        fd.replay_routing(fd.enable(mixture("mixtral")), choices)
    with pytest.raises(ValueError, match=r"chooses 2 of 8 experts .* given 1 of 8"):
        scored(model, rows, replace(choices, stored=choices.stored[..., :1]))
    with pytest.raises(ValueError, match="compiled, traced or transformed"):
        torch.func.grad(lambda scale: (scored(model, rows, choices) * scale).sum())(torch.ones(()))
    with pytest.raises(ValueError, match=r"call hf_fastdecode.enable\(model\) first"):
        fd.replay_routing(mixture(), choices)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        fd.replay_routing(fd.enable(tiny_model("llama-gqa")), choices)
