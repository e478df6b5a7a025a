"""One class: `generate` of its tiny model, stock and enabled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.prompts.gain import Savings
from hf_fastdecode.generation.structure import Structure

from ..image_inputs import KINDS, prompts_with_images
from ..tiny_models import ragged_prompts, seeded
from .classes import tiny_model_of
from .overrides import INPUTS

_SHARED = 40
_PROMPTS = ragged_prompts(57, 71, 64, shared=_SHARED)
_CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0, "num_return_sequences": 2},
}
_CALLS_WITH: dict[str, dict[str, Any]] = {
    "sampling": _CALLS["sampling"],
    "beams": {"do_sample": False, "num_beams": 2},
}
_WITH_ENCODER: dict[str, dict[str, Any]] = {"beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2}}
_NEW_TOKENS = 10


@dataclass(frozen=True)
class Verdict:
    """Result of comparing a class.

    Attributes:
        kind: ``shared`` and ``stock`` are how it ran, with stock's tokens; ``wrong`` gave other tokens, ``crashed``
            raised where stock does not, ``blind`` gives the same tokens over a spoilt cache, so that the comparison
            shows nothing; ``not compared`` is a class that stock transformers does not build or run here.
        reason: Why, for all but ``shared``.
        model_type: Of its config, where it was built.
        inputs: Images or sounds in prompts that it was compared with too, and how those calls ran, if not shared.
    """

    kind: str
    reason: str = ""
    model_type: str = ""
    inputs: str = ""


def verdict_on(name: str) -> Verdict:
    """Compare a class with stock: several left-padded prompts that begin alike, greedy and sampled, also over a kept
    cache; and prompts with images or sounds, sampled and by beams."""
    model_type = ""
    try:
        model = tiny_model_of(name)
        model_type = model.config.model_type
        inputs = _inputs(name, model)
        stock = stock_tokens(model, inputs)
    except Exception as error:
        return Verdict("not compared", _line(error), model_type)
    try:
        kind, reason = compared(model, inputs, stock)
        found = (
            [_compared_with(model, kind_of_input) for kind_of_input in KINDS] if kind in ("shared", "stock") else []
        )
        if wrong := [ran for ran in found if ran.startswith("wrong")]:
            return Verdict("wrong", "; ".join(wrong), model_type)
        return Verdict(kind, reason, model_type, "; ".join(filter(None, found)))
    except Exception as error:
        return Verdict("crashed", _line(error), model_type)


def stock_tokens(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tokens of a model that is not enabled, by call; without calls whose mode its class refuses."""
    found: dict[str, Tensor] = {}
    for call in (_CALLS | _WITH_ENCODER) if model.config.is_encoder_decoder else _CALLS:
        try:
            found[call] = _generate(model, inputs, call)
        except ValueError as error:
            if not found or not re.search("only supports|is incompatible with|incompatible mode", str(error)):
                raise
    return found


def compared(model: PreTrainedModel, inputs: dict[str, Tensor], stock: dict[str, Tensor]) -> tuple[str, str]:
    """The verdict's kind and reason, of a model whose stock tokens for these inputs are known."""
    with fd.enabled(model, min_saved_tokens=1):
        for call in stock:
            tokens = _generate(model, inputs, call)
            report = fd.explain(model).last_call
            assert report is not None
            if not torch.equal(tokens, stock[call]):
                return "wrong", f"{call}, {report.path}"
        if report.path == "stock":
            return "stock", report.reason
        Savings.of(model, Structure(model))  # as min_saved_tokens="auto" estimates them
        calls = [call for call in _CALLS if call in stock]
        for call in calls:
            if model.config.is_encoder_decoder:  # whose prompts belong to an input
                break
            if not torch.equal(_generate(model, inputs, call, _kept(model)), stock[call]):
                return "wrong", f"{call}, with a kept cache"
        # One call suffices: some classes' sampled tokens are near uniform, and some repeat one token when greedy.
        last = fd.explain(model).last_call
        continued = last is not None and any(last.known_tokens or ())
        if all(
            torch.equal(_spoilt_tokens(model, inputs, call, continued), _new(stock[call]))
            for call in _CALLS.keys() & stock
        ):
            return "blind", "tokens do not depend on the shared context"
        return "shared", ""


def _compared_with(model: PreTrainedModel, kind: str) -> str:
    """How calls with images or sounds ran; nothing where the class takes none, or none that stock runs are known."""
    try:
        inputs = prompts_with_images(model, (5, (4, 4), 9), (3, (4, 8, 1), 12), kind=kind)
        stock = {call: _generate_with(model, inputs, call) for call in _CALLS_WITH}
    except Exception:
        return ""
    with fd.enabled(model, min_saved_tokens=1):
        for call in _CALLS_WITH:
            tokens = _generate_with(model, inputs, call)
            report = fd.explain(model).last_call
            if not torch.equal(tokens, stock[call]):
                return f"wrong with {kind}, {call}"
            if report is not None and report.path == "stock":
                return f"{kind}: stock, {report.reason}"
    return kind


def _generate_with(model: PreTrainedModel, inputs: dict[str, Tensor], call: str) -> Tensor:
    tokens = seeded(lambda: model.generate(**inputs, **_CALLS_WITH[call], max_new_tokens=_NEW_TOKENS))
    return tokens if isinstance(tokens, Tensor) else tokens[0]


def _spoilt_tokens(model: PreTrainedModel, inputs: dict[str, Tensor], call: str, continued: bool) -> Tensor:
    """New tokens over a spoilt cache; of classes that do not continue one, behind prompts that only end alike."""
    if continued:
        return _new(_generate(model, inputs, call, _spoilt(_kept(model))))
    if "input_ids" not in inputs:  # sounds or images
        name = model.main_input_name
        return _new(_generate(model, inputs | {name: inputs[name].flip(-1)}, call))
    ids = inputs["input_ids"].clone()
    begin = ids[:, :-8]
    begin[begin != 0] = 99 - begin[begin != 0]
    return _new(_generate(model, inputs | {"input_ids": ids}, call))


def _new(tokens: Tensor) -> Tensor:
    return tokens[:, -_NEW_TOKENS:]


def _kept(model: PreTrainedModel) -> fd.SharedContextCache:
    return fd.prefill(model, _PROMPTS["input_ids"][1:2, :_SHARED])  # the longest prompt has no padding


def _spoilt(cache: fd.SharedContextCache) -> fd.SharedContextCache:
    """With other values in its nodes, and other states at their ends: whoever compares must see it."""
    for layer in cache.attention_layers:
        for segment in layer.storage.segments.values():
            segment.values.neg_()
    for states in cache.state_layers:
        for end in states.ends.values():
            for one in end.tensors:
                one.neg_()
    return cache


def _inputs(name: str, model: PreTrainedModel) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    other = {key: torch.randn(shape, generator=generator) for key, shape in INPUTS.get(name, {}).items()}
    return {**(_PROMPTS if not other or model.main_input_name == "input_ids" else {}), **other}


def _generate(
    model: PreTrainedModel, inputs: dict[str, Tensor], call: str, cache: fd.SharedContextCache | None = None
) -> Tensor:
    arguments = (_CALLS | _WITH_ENCODER)[call] | ({} if cache is None else {CACHE: cache})
    tokens = seeded(lambda: model.generate(**inputs, **arguments, max_new_tokens=_NEW_TOKENS))
    return tokens if isinstance(tokens, Tensor) else tokens[0]  # some classes give more


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"
