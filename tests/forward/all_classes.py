"""``python -m tests.forward.all_classes [CLASS ...]``: forward and backward passes of all decoders beside stock's.

Generating classes and those that classify sequences, as tiny random models in fp32 on the CPU. Each is called over
rows that begin alike, padded on the left and on the right, with and without gradients; so are the decoder inside and,
where this is another module, the model without its head. Prints each class's verdict: ``shared``; ``stock`` with the
reasons; ``wrong``, outputs or gradients farther from float64 than `comparison` allows; ``crashed``, raised where stock
does not; ``blind``, tokens do not depend on what is shared; ``not compared``, stock is not built, or not run with
these inputs. The exit code is 1 when any class is wrong, crashed or blind.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers.models
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..architectures import classes
from ..architectures.compare import Verdict
from ..architectures.overrides import INPUTS, OVERRIDES
from ..architectures.processes import verdicts_of
from ..architectures.shrink import shrunken
from ..tiny_models import ragged_prompts, redrawn
from .comparison import Outcome, exact_of, faults, gradients, in_doubles, projection, report_of, sharing

_SHARED = 26
_LENGTHS = (31, 37, 37)  # windows of 24 tokens end within what rows share, and behind it
_LABELS = 3
_FAILURES = ("wrong", "crashed", "blind")


@cache
def classifying_classes() -> dict[str, str]:
    """Class name -> module, of all that classify sequences with a body that a generating class has too."""
    found: dict[str, str] = {}
    for path in sorted(Path(transformers.models.__file__).parent.glob("*/modeling_*.py")):
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        if module in classes.generating_classes().values():
            found |= dict.fromkeys(
                re.findall(r"^class (\w+ForSequenceClassification)\(", path.read_text(), re.M), module
            )
    return found


def all_classes() -> list[str]:
    """All that are compared."""
    return sorted([*classes.generating_classes(), *classifying_classes()])


def tiny_model_of(name: str) -> PreTrainedModel:
    """A random model in eval mode, of either kind."""
    if name in classes.generating_classes():
        return classes.tiny_model_of(name)
    kind = getattr(importlib.import_module(classifying_classes()[name]), name)
    others = [
        other for other in classes.generating_classes() if classes.generating_classes()[other] == kind.__module__
    ]
    of_family = next((OVERRIDES[other] for other in others if other in OVERRIDES), {})
    torch.manual_seed(0)
    config = shrunken(kind.config_class, of_family)
    config.num_labels, config.get_text_config().pad_token_id = _LABELS, 0
    model = redrawn(kind(config).eval(), 0.15)
    classes.lively_norms(model)
    return model


def verdict_on(name: str) -> Verdict:
    """Compare a class with stock."""
    model_type, found = "", dict[str, Verdict]()
    try:
        model = tiny_model_of(name)
        model_type = model.config.model_type
        parts = parts_of(model)
        doubles = parts_of(in_doubles(copy.deepcopy(model)))
    except Exception as error:
        return Verdict("not compared", _line(error), model_type)
    for part in parts:
        for side in ("left", "right"):
            inputs = inputs_of(name if part == "model" else "", parts[part], side)
            with_gradients, without = _verdicts(parts[part], doubles[part], inputs)
            found[f"{part}, {side}"] = with_gradients
            if without != with_gradients:
                found[f"{part}, {side}, no gradients"] = without
    kinds = {verdict.kind for verdict in found.values()}
    kind = next(one for one in (*_FAILURES, "shared", "stock", "not compared") if one in kinds)
    reasons: dict[str, list[str]] = {}
    for place, verdict in found.items():
        if verdict.kind != "shared":
            reasons.setdefault(f"{verdict.kind}, {verdict.reason}", []).append(place)
    return Verdict(
        kind, "; ".join(f"{' and '.join(places)}: {reason}" for reason, places in reasons.items()), model_type
    )


def parts_of(model: PreTrainedModel) -> dict[str, PreTrainedModel]:
    """The model, the same without its head, and the decoder inside, where these are modules of their own."""
    parts = {"model": model, "body": model.base_model}
    if not model.config.is_encoder_decoder:
        parts["decoder"] = model.get_decoder()
    seen: list[nn.Module] = []
    for name, part in list(parts.items()):
        if not isinstance(part, PreTrainedModel) or any(part is one for one in seen):
            del parts[name]
        seen.append(part)
    return parts


def inputs_of(name: str, model: PreTrainedModel, side: str) -> dict[str, Any]:
    """Rows that begin alike; and sounds or images where the class is not called with text alone."""
    text = ragged_prompts(*_LENGTHS, shared=_SHARED)
    if side == "right":
        text = {key: _moved_right(value, text["attention_mask"]) for key, value in text.items()}
    if model.config.is_encoder_decoder:
        text |= {f"decoder_{key}": value for key, value in text.items()}
    generator = torch.Generator().manual_seed(0)
    other: dict[str, Any] = {
        key: torch.randn(shape, generator=generator) for key, shape in INPUTS.get(name, {}).items()
    }
    if "use_cache" in inspect.signature(type(model).forward).parameters:
        other["use_cache"] = False
    if INPUTS.get(name) and model.main_input_name != "input_ids":
        text = {key: value for key, value in text.items() if key.startswith("decoder_")}
    return text | other


def _moved_right(values: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([row.roll(-int(len(row) - real.sum())) for row, real in zip(values, mask, strict=True)])


def _verdicts(model: PreTrainedModel, doubles: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Verdict, Verdict]:
    """The verdicts on passes with and without gradients."""
    run = partial(_run, inputs=inputs)
    try:
        stock = run(model)
    except Exception as error:
        return (Verdict("not compared", _line(error)),) * 2
    try:
        oracle = _exact(doubles, _doubled(inputs))
    except Exception as error:
        return (Verdict("not compared", f"in float64: {_line(error)}"),) * 2
    if not all(value.isfinite().all() for value in oracle.values()):
        return (Verdict("not compared", "stock gives NaN"),) * 2
    with_gradients = _verdict(model, run, stock, oracle, inputs)
    run, output = torch.no_grad()(run), {"output": stock["output"]}
    return with_gradients, _verdict(model, run, output, {"output": oracle["output"]}, inputs)


def _exact(doubles: PreTrainedModel, inputs: dict[str, Any]) -> Outcome:
    run = partial(_run, inputs=inputs)
    try:
        return exact_of(doubles, run)
    except RuntimeError:  # where transformers needs its float32
        return run(doubles)


def _verdict(
    model: PreTrainedModel, run: Callable[[PreTrainedModel], Outcome], stock: Outcome, oracle: Outcome, inputs: Any
) -> Verdict:
    try:
        with sharing(model):
            ours, report = run(model), report_of(model)
    except Exception as error:
        return Verdict("crashed", _line(error))
    path, reason = (report.path, report.reason) if report is not None else ("stock", "no report")
    if path == "failed":
        return Verdict("crashed", reason)
    if found := faults(ours, stock, oracle):
        if _reads_padding(model, inputs):
            return Verdict("not compared", "outputs depend on what stock computes of padding")
        return Verdict("wrong", f"{path}: {found[0]} and {len(found) - 1} more")
    if path == "shared":
        if _is_blind(model, inputs, stock):
            return Verdict("blind", "no output depends on the first tokens of its row")
        return Verdict("shared")
    return Verdict("stock", reason)


def _run(model: PreTrainedModel, inputs: dict[str, Any]) -> Outcome:
    """Outputs of real tokens, and gradients."""
    real = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    value = _main_output(model(**inputs))
    if real is not None and value.shape[:2] == real.shape:
        value = value[real.bool()]
    found = {"output": value.detach()}
    return found | gradients(model, projection({"output": value})) if value.requires_grad else found


def _main_output(output: Any) -> Tensor:
    for name in ("logits", "last_hidden_state"):
        if isinstance(value := getattr(output, name, None), Tensor):
            return value
    return next(value for value in output.values() if isinstance(value, Tensor) and value.is_floating_point())


def _doubled(inputs: dict[str, Any]) -> dict[str, Any]:
    tensors = {
        name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()
    }
    return inputs | {name: value.double() for name, value in tensors.items()}


def _reads_padding(model: PreTrainedModel, inputs: dict[str, Any]) -> bool:
    """Whether stock gives other outputs for other ids in padding."""
    others = {**inputs, "input_ids": inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, 9)}
    with torch.no_grad():
        return not torch.equal(_run(model, others)["output"], _run(model, inputs)["output"])


def _is_blind(model: PreTrainedModel, inputs: dict[str, Any], stock: Outcome) -> bool:
    """Whether stock gives the same for rows that begin otherwise."""
    ids = inputs["input_ids"].clone()
    begins = (inputs["attention_mask"].cumsum(-1) <= _SHARED // 2) & inputs["attention_mask"].bool()
    ids[begins] = 99 - ids[begins]
    with torch.no_grad():
        other = _run(model, inputs | {"input_ids": ids})["output"]
    behind = (inputs["attention_mask"].cumsum(-1) > _SHARED)[inputs["attention_mask"].bool()]
    if len(other) != len(behind):  # an output for each row
        behind = torch.ones(len(other), dtype=torch.bool)
    return bool((other[behind] - stock["output"][behind]).norm() <= 1e-3 * stock["output"][behind].norm())


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"


def main() -> int:
    """Run the command; returns the exit code."""
    asked = sys.argv[1:]
    if unknown := sorted(set(asked) - set(all_classes())):
        sys.exit(f"{unknown[0]} is none of the classes that are compared")
    counts: Counter[str] = Counter()
    for name, verdict, seconds in verdicts_of(asked or all_classes(), verdict_on, processes=1):
        counts[verdict.kind] += 1
        print(f"{seconds:6.1f} s  {name}: {verdict.kind}{verdict.reason and ', '}{verdict.reason}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    return int(any(counts[kind] for kind in _FAILURES))


if __name__ == "__main__":
    sys.exit(main())
