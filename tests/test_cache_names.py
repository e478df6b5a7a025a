"""The name of the cache: ``past_key_values``, or ``cache`` from transformers 5.24 on, which takes the old name too.

What stock transformers accepts under a name, an enabled or slim model accepts, with stock's warnings and no others;
what stock refuses is refused with its message.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from .patches.encoder_decoder_models import encoder_decoder_pair, read_by
from .patches.family_models import FAMILIES, family_pair
from .tiny_models import ragged_prompts, tiny_model

NAMES = ["cache", "past_key_values"]
KNOWN = NAMES if CACHE == "cache" else [CACHE]  # to the installed transformers
IDS = ragged_prompts(80)["input_ids"]
NEXT = torch.arange(5, 9)[None]
SHORT = {"max_new_tokens": 5, "do_sample": False}


@dataclass(frozen=True)
class Outcome:
    """What a use of the cache came to.

    Attributes:
        values: The tensors that it returned.
        error: Type and message of what it raised, likewise.
        warned: FutureWarnings, and what transformers logs, with model and cache as 'it'.
    """

    values: list[Tensor]
    error: str
    warned: set[str]


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.add(record.getMessage())


def outcome(use: Callable[..., Any], model: PreTrainedModel, name: str, cache: Any) -> Outcome:
    """What `use` comes to, where each warning counts as if it were the first."""
    shown = repr(cache)
    messages, logger = _Messages(), transformers_logging.get_logger("transformers")
    transformers_logging.warning_once.cache_clear()
    logger.addHandler(messages)
    values, error = [], ""
    try:
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            values = list(use(model, name, cache))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        logger.removeHandler(messages)
    warned = {str(one.message) for one in caught if issubclass(one.category, FutureWarning)} | messages.texts
    own = type(model).__name__
    for name in (shown, shown.replace("layers=0", "layers=2"), own, own.removeprefix("Slim")):  # a pass makes layers
        error, warned = error.replace(name, "it"), {text.replace(name, "it") for text in warned}
    return Outcome(values, error, warned)


def generated(model, ids, **options):
    """What `generate` returns, with a mask that hides none of the tokens that it made, not even those that pad."""
    return model.generate(ids, attention_mask=torch.ones_like(ids), **SHORT, **options)


def calls_generate(model, name, cache, **options):
    yield generated(model, IDS, **{name: cache}, **options)


def continues_generate(model, name, cache):
    out = generated(model, IDS, **{name: cache}, return_dict_in_generate=True)
    yield out.sequences
    yield generated(model, torch.cat([out.sequences, NEXT], 1), **{name: out[CACHE]})


def searches_beams(model, name, cache):
    return calls_generate(model, name, cache, num_beams=3)


def drafts(model, name, cache):
    return calls_generate(model, name, cache, prompt_lookup_num_tokens=3)


def loops_by_itself(model, name, cache):
    """A `custom_generate` that hands the cache on under this name."""

    def loop(model, input_ids, **arguments):
        cache = arguments[CACHE]
        logits = model(input_ids, **{name: cache}, use_cache=True).logits
        token = logits[:, -1:].argmax(-1)
        return torch.cat([input_ids, token, model(token, **{name: cache}).logits[:, -1:].argmax(-1)], 1)

    yield generated(model, IDS, custom_generate=loop)


def passes(model, name, cache):
    for ids in (IDS, NEXT, NEXT):
        out = model(ids, **{name: cache}, use_cache=True)
        yield torch.tensor(out[CACHE] is cache)
        yield out.logits


def passes_in_order(model, name, cache):
    """Whatever the name: the arguments by their places."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    at = names.index(CACHE)
    for ids in (IDS, NEXT):
        given = dict.fromkeys(names[:at]) | {"input_ids": ids}
        yield model(*given.values(), cache).logits


def passes_both(model, name, cache):
    yield model(IDS, **dict.fromkeys(NAMES, cache)).logits


def prepares(model, name, cache):
    given = model.prepare_inputs_for_generation(IDS, **{name: cache}, attention_mask=torch.ones_like(IDS))
    yield torch.tensor(given.get(CACHE) is cache)
    yield from (part for part in given.values() if isinstance(part, Tensor))


def reads_output(model, name, cache):
    out = model(IDS, **{CACHE: cache}, use_cache=True)
    yield torch.tensor(getattr(out, name) is cache and out[name] is cache)
    yield out.logits


USES = [
    *(calls_generate, continues_generate, searches_beams, drafts, loops_by_itself),
    *(passes, passes_in_order, prepares, reads_output),
    *([passes_both] if KNOWN == NAMES else []),
]
OF_GENERATE = (continues_generate, searches_beams, drafts, loops_by_itself)
"""Uses that `generate` makes of a cache, the same for all models that take one from it by `calls_generate`."""


def same(found: Outcome, stock: Outcome) -> None:
    assert found.error == stock.error
    assert found.warned == stock.warned
    assert len(found.values) == len(stock.values)
    for one, other in zip(found.values, stock.values, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # tokens are equal then


@pytest.mark.parametrize("kind", [DynamicCache, fd.SharedContextCache])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use", USES)
def test_an_enabled_model(use, name, kind):
    model = tiny_model("llama-gqa")
    stock = outcome(use, model, name, DynamicCache(config=model.config))
    with fd.enabled(model, min_saved_tokens=0):
        cache: Cache = kind() if kind is fd.SharedContextCache else kind(config=model.config)
        found = outcome(use, model, name, cache)
        if not stock.error and use in (calls_generate, searches_beams, drafts):
            assert fd.explain(model).last_call.path == ("shared" if kind is fd.SharedContextCache else "stock")
    same(found, stock)


@pytest.mark.parametrize("use", USES)
def test_the_installed_name_is_accepted_without_a_warning(use):
    model = tiny_model("llama-gqa")
    stock = outcome(use, model, CACHE, DynamicCache(config=model.config))
    assert not stock.error
    assert bool(stock.warned) == (use is passes_both)


@pytest.mark.parametrize(
    ("family", "use"),
    [(family, use) for family in FAMILIES for use in USES if family in ("phi3", "gpt2") or use not in OF_GENERATE],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_slim_model(name, family, use):
    """Its own values, under any name, are those of the installed name."""
    model, slim = family_pair(family, "k")
    stock, expected, found = (
        outcome(use, one, as_name, DynamicCache(config=one.config))
        for one, as_name in ((model, name), (slim, CACHE), (slim, name))
    )
    assert found.error == stock.error
    assert found.warned == stock.warned
    if not found.error and name in KNOWN:
        same(Outcome(found.values, "", set()), Outcome(expected.values, "", set()))


def decodes(model, name, cache):
    read = read_by(model, rows=1)
    start = torch.full((1, 1), model.config.decoder_start_token_id)
    for _ in range(2):
        yield model(**read, decoder_input_ids=start, **{name: cache}, use_cache=True).logits


def generates(model, name, cache):
    yield model.generate(**read_by(model, rows=1), **{name: cache}, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use", [decodes, generates])
def test_a_slim_model_with_an_encoder(use, name, family):
    model, slim = encoder_decoder_pair(family, "k")
    stock, expected, found = (
        outcome(use, one, as_name, EncoderDecoderCache(DynamicCache(), DynamicCache()))
        for one, as_name in ((model, name), (slim, CACHE), (slim, name))
    )
    assert found.error == stock.error
    assert found.warned == stock.warned
    if not found.error and name in KNOWN:
        same(Outcome(found.values, "", set()), Outcome(expected.values, "", set()))


@pytest.mark.skipif(CACHE == "cache", reason="transformers 5.24 and later read this name")
def test_a_kept_cache_under_the_name_of_later_releases_is_not_ignored_silently(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model()
    with fd.enabled(model), torch.no_grad():
        model(NEXT, cache=fd.prefill(model, IDS))
    (said,) = caplog.messages
    assert f"calls {CACHE} and otherwise ignores" in said
