"""Small models, their calls, and loops of the user's whose passes are compared: eager ones and captured ones."""

import copy

import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ...tiny_models import VOCABULARY, ragged_prompts, seeded, tiny_model
from ..calls import PROMPT

# Interpreting takes time by the program: one for each layer, KV head and row.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES = {"llama-gqa": SMALL, "llama-mha": SMALL | {"num_key_value_heads": 2}, "gpt2": {"n_layer": 1, "n_head": 2}}
WINDOWED = {"mistral-window": SMALL, "gemma3_text": SMALL | {"num_hidden_layers": 2, "head_dim": 32}}
PROMPTS = ragged_prompts(41, 36, shared=33)
TWICE = {key: part.repeat(2, 1) for key, part in PROMPT.items()}
DICT = {"return_dict_in_generate": True}


def small(name="llama-gqa"):
    return tiny_model(name, **(SIZES | WINDOWED)[name])


def enabled(model, **options):
    return fd.enabled(model, **{"mode": "graph", "backend": "triton", "min_saved_tokens": 1, **options})


def sequences(out):
    return out if isinstance(out, torch.Tensor) else out.sequences


def both(model, prompt, arguments, **options):
    """What stock and captured loops return, whose tokens are to be the same, and the captured one's report."""
    stock = seeded(lambda: model.generate(**prompt, **arguments))
    with enabled(model, **options):
        captured = seeded(lambda: model.generate(**prompt, **arguments))
        assert torch.equal(sequences(captured), sequences(stock))
        return stock, captured, fd.explain(model).last_call


def require_captured(report, captures=None):
    """Require that all passes of a call's loop were captured ones, and the number of new captures if given."""
    assert report.mode == "graph"
    assert "ran eagerly" not in report.mode_reason
    assert captures in (None, report.captures)


def loop(actions, outputs):
    """A loop of the user's: a prefill, then a pass for each action, on tokens that do not depend on logits.

    An action is a number of tokens, arguments for a pass of one token, or a function of the model and the cache.
    """

    def run(model, input_ids, **arguments):
        generator, cache = torch.Generator().manual_seed(5), arguments[CACHE]
        model(input_ids, logits_to_keep=1, **{CACHE: cache})
        for action in actions:
            if callable(action):
                action(model, cache)
                continue
            tokens, extra = (action, {}) if isinstance(action, int) else (1, action)
            fed = torch.randint(3, VOCABULARY, (cache.rows, tokens), generator=generator)
            output = model(fed, **{CACHE: cache}, **extra)
            assert output[CACHE] is cache
            outputs.append(output.logits)
        return input_ids

    return run


def logits_of(model, actions, *, mode="graph", **call):
    """Logits of each pass of a loop, and the call's report."""
    found = []
    with enabled(model, mode=mode, backend="auto"):
        model.generate(**TWICE, custom_generate=loop(actions, found), max_new_tokens=100, **call)
        return found, fd.explain(model).last_call


def check(model, actions, **call):
    """Run a loop eagerly and captured, compare the logits of its passes, and return the captured one's report."""
    expected, report = logits_of(copy.deepcopy(model), actions, mode="eager", **call)
    assert report.mode == "eager"
    found, report = logits_of(model, actions, **call)
    for own, theirs in zip(found, expected, strict=True):
        assert own.shape == theirs.shape
        torch.testing.assert_close(own, theirs, atol=1e-4, rtol=1e-4)
    return report


def reorder(*rows):
    return lambda model, cache: cache.reorder_cache(torch.tensor(rows))
