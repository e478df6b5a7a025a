"""Raw log-probabilities of drawn tokens, gathered by stock transformers and by the shared loop."""

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.generation.decoding.sampling import NotFiniteError, TokenLogProbs

from ..tiny_models import ragged_prompts, seeded, tiny_model

WIDTH = 70
PROMPTS = ragged_prompts(WIDTH, 60, shared=40)
SAMPLING = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0, "num_return_sequences": 4}
ENDS = {"eos_token_id": list(range(3, 10)), "max_new_tokens": 24}


def gathered(model, **arguments):
    """Tokens behind the prompts, their log-probabilities, and which of them are before the rows' ends."""
    log_probs = TokenLogProbs()
    tokens = seeded(lambda: model.generate(**PROMPTS, logits_processor=[log_probs], **arguments))[:, WIDTH:]
    ended = torch.isin(tokens, torch.tensor(ENDS["eos_token_id"])).long()
    return tokens, log_probs.of(tokens), (ended.cumsum(1) - ended) == 0


def expected_log_probs(model, tokens):
    """By one pass over prompt and tokens."""
    repeated = {name: value.repeat_interleave(len(tokens) // 2, 0) for name, value in PROMPTS.items()}
    ids = torch.cat([repeated["input_ids"], tokens], dim=1)
    mask = torch.cat([repeated["attention_mask"], torch.ones_like(tokens)], dim=1)
    logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    return logits[:, WIDTH - 1 : -1].log_softmax(-1).gather(2, tokens[..., None])[..., 0]


@pytest.mark.parametrize("arguments", [SAMPLING | ENDS, {"do_sample": False} | ENDS], ids=["sampled", "greedy"])
def test_they_are_the_models_own(model, arguments):
    """Before temperature and top-p; in both loops, also while finished rows are compacted away."""
    stock, *by_stock = gathered(model, **arguments)
    with fd.enabled(model, min_saved_tokens=1):
        shared, *by_shared = gathered(model, **arguments)
        report = fd.explain(model).last_call
    assert report.path == "shared"
    assert torch.equal(shared, stock)
    expected = expected_log_probs(model, stock)
    for found, kept in (by_stock, by_shared):
        assert (found - expected)[kept].abs().max() < 1e-4
    if arguments["do_sample"]:
        assert report.compactions >= 1


def test_they_survive_smaller_waves(model, monkeypatch):
    from hf_fastdecode.generation.steps.modes import EagerSteps

    call = EagerSteps.__call__

    def at_most_three_rows(self, ids, positions):
        if len(ids) > 3:
            raise torch.OutOfMemoryError("on purpose")
        return call(self, ids, positions)

    stock, *_ = gathered(model, do_sample=False, **ENDS)
    arguments = {"do_sample": True, "top_k": 1, "num_return_sequences": 4} | ENDS  # four times the greedy tokens
    with fd.enabled(model, min_saved_tokens=1):
        monkeypatch.setattr(EagerSteps, "__call__", at_most_three_rows)
        tokens, found, kept = gathered(model, **arguments)
        assert fd.explain(model).last_call.waves >= 3
    assert torch.equal(tokens, stock.repeat_interleave(4, 0))
    assert (found - expected_log_probs(model, tokens))[kept].abs().max() < 1e-4


def test_the_sampling_kernel_gives_them(model):
    pytest.importorskip("triton")
    arguments = SAMPLING | {"max_new_tokens": 4}
    with fd.enabled(model, sampler="fast"):
        tokens, found, kept = gathered(model, **arguments)
        assert fd.explain(model).last_call.sampler == "fast"
    assert (found - expected_log_probs(model, tokens))[kept].abs().max() < 1e-4


def test_steps_are_told(model):
    steps = []
    with fd.enabled(model, min_saved_tokens=1):
        model.generate(**PROMPTS, max_new_tokens=3, logits_processor=[TokenLogProbs(steps.append)])
    assert steps == [0, 1, 2]


def test_logits_that_are_no_numbers():
    model = tiny_model("llama-gqa")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    for enabled in (False, True):
        if enabled:
            fd.enable(model, min_saved_tokens=1)
        with pytest.raises(NotFiniteError, match=r"logits are NaN, .*; see whether its weights are finite"):
            model.generate(**PROMPTS, max_new_tokens=3, logits_processor=[TokenLogProbs()])


def test_other_tokens_are_refused(model):
    log_probs = TokenLogProbs()
    with fd.enabled(model, min_saved_tokens=1):
        tokens = model.generate(**PROMPTS, max_new_tokens=3, logits_processor=[log_probs])
    with pytest.raises(ValueError, match=r"got tokens of shape \(2, 73\).*without the prompts"):
        log_probs.of(tokens)
    with pytest.raises(ValueError, match="a new TokenLogProbs to each call"):
        TokenLogProbs().of(tokens)


@pytest.mark.parametrize("options", [None, {}, {"log_probs": "trainer"}], ids=["stock", "steps", "trainer"])
def test_tokens_of_another_call_are_refused(model, options):
    """Of the same shape, too; its first tokens alone are this call's."""
    log_probs = TokenLogProbs()
    if options is not None:
        fd.enable(model, min_saved_tokens=1, **options)
    arguments = {"do_sample": False, "max_new_tokens": 4}
    tokens = model.generate(**PROMPTS, logits_processor=[log_probs], **arguments)[:, WIDTH:]
    fd.disable(model)
    found, other = log_probs.of(tokens), tokens.clone()
    other[1, 2] += 1
    with pytest.raises(ValueError, match=rf"token 2 of row 1 is {other[1, 2]}, .* {tokens[1, 2]}; pass what generate"):
        log_probs.of(other)
    assert torch.equal(log_probs.of(other[:, :2].int()), found[:, :2])
    again = model.generate(**PROMPTS, logits_processor=[log_probs], **arguments)[:, WIDTH:]
    with pytest.raises(ValueError, match="a new TokenLogProbs to each call"):
        log_probs.of(again)
