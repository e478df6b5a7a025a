"""A call that the tests of `generate` make, and how they compare it with stock transformers."""

from contextlib import contextmanager

import torch

import hf_fastdecode as fd

from ..module_calls import before_calls
from ..tiny_models import ragged_prompts, seeded

PROMPT = ragged_prompts(80)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 4, "max_new_tokens": 8}


def both(model, arguments, prompt=PROMPT):
    """The output of stock and of shared decoding from one seed, and the shared call's report."""
    stock = seeded(lambda: model.generate(**prompt, **arguments()))
    with fd.enabled(model):
        shared = seeded(lambda: model.generate(**prompt, **arguments()))
        return stock, shared, fd.explain(model).last_call


def as_in_stock(model, call, path=None, **options):
    """The report of a call that returns stock's tokens, from one seed, and took this path where one is named."""
    stock = _tokens(seeded(call))
    with fd.enabled(model, **options):
        found = _tokens(seeded(call))
        report = fd.explain(model).last_call
    assert torch.equal(found, stock)
    assert path in (None, report.path), report.reason
    return report


def _tokens(output):
    return output if isinstance(output, torch.Tensor) else output.sequences


@contextmanager
def tokens_embedded(model):
    """Within, the list holds how many tokens each pass of this model looked up."""
    counted = []
    with before_calls(model.get_input_embeddings(), lambda args, kwargs: counted.append(args[0].numel())):
        yield counted


def check_shared(model, arguments, prompt=PROMPT):
    """Require that a call shares and gives stock's tokens; returns these, and the call's report."""
    stock, shared, call = both(model, arguments, prompt)
    assert call.path == "shared", call.reason
    assert torch.equal(shared, stock)
    return stock, call
