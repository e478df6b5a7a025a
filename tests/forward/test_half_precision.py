"""Passes in bf16 on a GPU: log-probabilities and gradients against fp64 err at most a tenth more than stock's own."""

import copy

import pytest
import torch

import hf_fastdecode as fd

from ..tiny_models import tiny_model

pytestmark = pytest.mark.gpu

BOUND = 1.1
SEEDS = 4  # models, whose errors are added: a ratio of those of one differs by some percent from one to another
WIDTH, HEAD_DIM = 256, 64

FAMILIES = {
    "llama-gqa": {"hidden_size": WIDTH},
    "qwen3": {"hidden_size": WIDTH, "head_dim": HEAD_DIM},
    "gemma2": {"hidden_size": WIDTH, "head_dim": HEAD_DIM},  # soft caps, windows
    # Sinks, windows; all experts are chosen, so that rounding chooses none.
    "gpt_oss": {"hidden_size": WIDTH, "head_dim": HEAD_DIM, "num_experts_per_tok": 4},
    "gpt2": {"n_embd": WIDTH},
}
PROMPTS, LENGTH, SAMPLES, COMPLETION = 2, 147, 6, 63
"""Prompts and their tokens, completions of each and theirs: no padding, by whose queries stock's fp64 is NaN."""


def made(name, seed):
    """A random model in bf16, and the same in fp64."""
    model = tiny_model(name, seed=seed, **FAMILIES[name]).bfloat16()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(0.5)  # of models of a quarter of the width
    exact = copy.deepcopy(model).double()
    if name == "gpt_oss":
        exact.set_experts_implementation("eager")  # PyTorch has no grouped product in fp64
    return model, exact


def batch_of(vocabulary, seed):
    """``[rows, tokens]`` ids; rows that begin alike are not neighbours."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, vocabulary, (PROMPTS, LENGTH), generator=generator)
    drawn = torch.randint(3, vocabulary, (SAMPLES * PROMPTS, COMPLETION), generator=generator)
    return torch.cat([prompts.repeat(SAMPLES, 1), drawn], 1)


def results(model, ids):
    """Log-probabilities of the completions' tokens, and the gradients of their mean, flattened, in fp64."""
    model.zero_grad()
    logits = model(ids, use_cache=False).logits[:, -COMPLETION - 1 : -1]
    found = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    found = found.gather(-1, ids[:, -COMPLETION:, None])
    found.mean().neg().backward()
    gradients = [weight.grad.flatten().double() for weight in model.parameters() if weight.grad is not None]
    return found.detach().flatten().double(), torch.cat(gradients)


def errors(name, device):
    """Sums of squared errors, of log-probabilities and of gradients: ours and stock's, ``[2, 2]``."""
    found = torch.zeros(2, 2, dtype=torch.float64)
    for seed in range(SEEDS):
        model, exact = (one.to(device) for one in made(name, seed))
        ids = batch_of(model.config.vocab_size, seed).to(device)
        oracle, stock = results(exact, ids), results(model, ids)
        with fd.enabled(model, share_forward=True, min_saved_tokens=1):
            ours = results(model, ids)
            report = fd.explain(model).last_forward
        assert report.path == "shared", report
        assert report.computed == PROMPTS * (LENGTH + SAMPLES * COMPLETION)
        for at, parts in enumerate((ours, stock)):
            found[at] += torch.stack([(part - right).square().sum().cpu() for part, right in zip(parts, oracle)])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_errors_are_at_most_a_tenth_more_than_stocks(name):
    ours, stock = errors(name, "cuda")
    ratios = (ours / stock).sqrt()
    print(f"{name}: log-probabilities {ratios[0]:.3f}, gradients {ratios[1]:.3f} times stock's")
    assert (ratios <= BOUND).all(), ratios  # not of NaN, either
