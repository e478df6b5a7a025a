"""Passes over rows that begin alike measured: seconds, peak memory, tokens computed and errors beside stock's.

A way is measured only after log-probabilities and gradients of a small model of its kind were found to err at most
twice as much as stock's against fp64; and so must the log-probabilities of the case itself, against wider weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode.measurement import calls as timed
from hf_fastdecode.measurement.rows import NotAvailableError, status_of
from hf_fastdecode.measurement.shapes import SHAPES, config_of, random_weights

from ..latest import Latest
from ..ops.inputs import BOUND
from .cases import ForwardCase

_COLUMNS = (
    *("status", "ran", "first_call_s", "s_p20", "s_p50", "s_p80", "peak_bytes", "tokens", "computed", "loss"),
    "error_ratio",
)
_CHUNK = 1024  # predictions whose logits are in memory at once
_CHECKED = 256  # predictions of a case that are compared, at least
_SMALL = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
# All experts are chosen, so that rounding chooses none.
_SMALL |= {"num_local_experts": 4, "num_experts_per_tok": 4}


class Rows(NamedTuple):
    """The rows of a case, those of a prompt one after the other: ``[rows, context + completion]`` int64."""

    ids: Tensor
    prompts: int
    context: int

    @classmethod
    def of(cls, case: ForwardCase, vocabulary: int, device: torch.device) -> Rows:
        torch.manual_seed(1)
        prompts = torch.randint(1, vocabulary, (case.prompts, case.context)).repeat_interleave(case.samples, 0)
        completions = torch.randint(1, vocabulary, (case.rows, case.completion))
        return cls(torch.cat([prompts, completions], 1).to(device), case.prompts, case.context)

    @property
    def completions(self) -> Tensor:
        """``[rows, completion]``"""
        return self.ids[:, self.context :]


Hidden = Callable[[], Tensor]
"""A pass: the decoder's last states where the completions' tokens are predicted, ``[rows, completion, hidden]``."""

PEERS: dict[str, Callable[[PreTrainedModel, Rows], Hidden]] = {}
"""Passes of other programs, see `FORWARD_WAYS`; they change the attention implementation."""


@contextmanager
def using(model: PreTrainedModel, way: str, rows: Rows, **options: Any) -> Iterator[Hidden]:
    """Within, a function that runs the pass this way, ours with options; on leaving, the model is as it was.

    Raises NotAvailableError where the way does not run here.
    """
    if way in PEERS:
        before: Any = model.config._attn_implementation
        try:
            yield PEERS[way](model, rows)
        finally:
            model.set_attn_implementation(before)
        return
    mask = torch.ones_like(rows.ids)

    def hidden() -> Tensor:
        out = model.get_decoder()(input_ids=rows.ids, attention_mask=mask, use_cache=False)
        states: Tensor = out.last_hidden_state
        return states[:, rows.context - 1 : -1]

    with nullcontext() if way == "stock" else fd.enabled(model, share_forward=True, **options):
        yield hidden


class ForwardBench:
    """Measures passes on one device; with `check`, a way only after its check.

    A pass is timed `repeats` times at most, and not again after `budget_s` seconds.
    """

    def __init__(self, device: torch.device, *, repeats: int = 5, check: bool = True, budget_s: float = 6.0):
        self.device, self.repeats, self.check, self.budget_s = device, repeats, check, budget_s
        self._model: Latest[PreTrainedModel] = Latest()
        self._exact: Latest[tuple[Tensor, Tensor]] = Latest()
        self._checked: dict[tuple[str, str, str], str | None] = {}

    def measure(self, case: ForwardCase, way: str) -> dict[str, Any]:
        """The columns of a way's measurement.

        ``first_call_s``: seconds of the first pass of these lengths; ``s_p20``, ``s_p50``, ``s_p80``: of later ones,
        with their gradients where the case has some. ``peak_bytes``: most memory in these, weights and gradients
        included, on CUDA. ``tokens``: given to the decoder; ``computed``: those that ran through its layers, where
        our report says it. ``loss``: mean negative log-probability of the completions' tokens. ``error_ratio``: error
        of the last rows' log-probabilities in multiples of stock's, of models without experts. ``ran``: what ran.
        """
        key = case.shape, case.dtype, way
        if self.check and way != "stock" and key not in self._checked:
            self._checked[key] = check_way(way, case, self.device)
        if red := self._checked.get(key):
            return dict.fromkeys(_COLUMNS) | {"status": red}
        return timed.guarded(_COLUMNS, lambda: self._measured(case, way))

    def _measured(self, case: ForwardCase, way: str) -> dict[str, Any]:
        dtype: torch.dtype = getattr(torch, case.dtype)
        config = config_of(case.shape, dtype)
        layers = case.layers or config.num_hidden_layers
        key = case.shape, layers, case.dtype
        model = self._model.of(key, lambda: _random(config, layers, self.device, dtype))
        rows = Rows.of(case, config.vocab_size, self.device)
        short = Rows.of(replace(case, prompts=1, samples=2, context=case.context // 2), config.vocab_size, self.device)
        exact = self._stock_and_exact(model, rows, case) if self.check else None
        with _prepared(model, case):
            with using(model, way, short) as hidden:
                _pass(model, hidden, short, case)  # loads what is loaded once
            with using(model, way, rows) as hidden:
                found: list[Tensor] = []
                first = timed.wall_seconds(lambda: found.append(_pass(model, hidden, rows, case)), self.device)
                held = timed.begin_peak(self.device)
                samples = timed.wall_samples(
                    lambda: _pass(model, hidden, rows, case), self.device, repeats=self.repeats, budget_s=self.budget_s
                )
                peak = timed.peak_over(self.device, None if held is None else 0)
                ran = _what_ran(model, rows, way)
        times = dict(zip(("s_p20", "s_p50", "s_p80"), timed.percentiles(samples), strict=True))
        row = {"first_call_s": first, **times, "peak_bytes": peak, "tokens": rows.ids.numel(), **ran}
        row["loss"] = -float(found[0].mean())
        if exact is not None:
            row["error_ratio"] = error_ratio(found[0][-len(exact[0]) :], *exact)
            if red := _red("log-probabilities", row["error_ratio"]):
                return {"status": red, "error_ratio": row["error_ratio"]}
        return row

    def _stock_and_exact(self, model: PreTrainedModel, rows: Rows, case: ForwardCase) -> tuple[Tensor, Tensor] | None:
        """Log-probabilities of the last rows by stock, with the model's weights and with these in fp32 (or fp64).

        None of models with experts: rounding chooses others.
        """
        if "num_local_experts" in SHAPES[case.shape]:
            return None
        dtype: torch.dtype = getattr(torch, case.dtype)
        count = min(case.rows, -(-_CHECKED // case.completion))
        last, scored = Rows(rows.ids[-count:], 1, rows.context), replace(case, work="scoring", checkpointing=False)

        def scores(weights: torch.dtype) -> Tensor:
            for weight in model.parameters():
                weight.data = weight.data.to(weights)
            return _pass(model, hidden, last, scored)

        wide = torch.float32 if dtype.itemsize == 2 else torch.float64
        with _prepared(model, scored), using(model, "stock", last) as hidden:
            exact, stock = self._exact.of(scored, lambda: (scores(wide), scores(dtype)))
        return stock, exact


def _random(config: Any, layers: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return random_weights(AutoModelForCausalLM, config, device, dtype)


@contextmanager
def _prepared(model: Any, case: ForwardCase) -> Iterator[None]:
    """Within, the model trains or scores as the case says; afterwards it has no gradients."""
    training = case.work == "training"
    enable, disable = (
        getattr(model, f"activation_checkpointing_{name}", getattr(model, f"gradient_checkpointing_{name}"))
        for name in ("enable", "disable")  # renamed in transformers 5.23
    )
    model.train(training)
    if case.checkpointing:
        enable({"use_reentrant": False})
    try:
        with torch.set_grad_enabled(training):
            yield
    finally:
        disable()
        model.zero_grad()
        model.eval()


def _pass(model: PreTrainedModel, hidden: Hidden, rows: Rows, case: ForwardCase) -> Tensor:
    """Log-probabilities of the completions' tokens, ``[rows, completion]``; when training, also their gradients."""
    model.zero_grad()
    states, head = hidden(), model.get_output_embeddings()

    def log_probs(states: Tensor, targets: Tensor) -> Tensor:
        logits = head(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)

    chunks = zip(states.flatten(0, 1).split(_CHUNK), rows.completions.flatten().split(_CHUNK), strict=True)
    found = torch.cat([checkpoint(log_probs, *chunk, use_reentrant=False) for chunk in chunks])
    if case.work == "training":
        found.mean().neg().backward()
    return found.detach().view(rows.completions.shape)


def _what_ran(model: PreTrainedModel, rows: Rows, way: str) -> dict[str, Any]:
    """The columns of our report; raises NotAvailableError where rows that begin alike ran stock."""
    if way != "enabled":
        return {}
    report = fd.explain(model).last_forward
    if report is not None and report.path == "shared":
        return {"ran": "shared", "computed": report.computed}
    ran = f"stock: {report.reason if report is not None else 'without a report'}"
    if len(rows.ids) > rows.prompts:
        raise NotAvailableError(f"it ran {ran}")
    return {"ran": ran, "computed": rows.ids.numel()}


def error_ratio(ours: Tensor, stock: Tensor, exact: Tensor) -> float:
    """Error of `ours` in multiples of stock's: of the largest ones or of the root mean squares, whichever is more."""
    errors, yardstick = ((part.double() - exact.double()).flatten() for part in (ours, stock))
    ratios = [vector_norm(errors, order) / vector_norm(yardstick, order) for order in (2, torch.inf)]
    return float(torch.stack(ratios).nan_to_num(nan=torch.inf).max())


def _red(what: str, ratio: float) -> str | None:
    return None if ratio <= BOUND else f"wrong: {what} err {ratio:.2f} times stock's, at most {BOUND:g} is right"


def check_way(way: str, case: ForwardCase, device: torch.device) -> str | None:
    """Check a way on a small model of the case's kind, with and without checkpointing; None when it is right."""
    try:
        config, shape = config_of(case.shape, getattr(torch, case.dtype)), SHAPES[case.shape]
        kv_heads = max(1, 4 * shape["num_key_value_heads"] // shape["num_attention_heads"])
        for name, value in (_SMALL | {"num_key_value_heads": kv_heads}).items():
            if getattr(config, name, None) is not None:
                setattr(config, name, value)
        model = _random(config, 2, device, getattr(torch, case.dtype))
        exact = copy.deepcopy(model).double()
        if "num_local_experts" in shape:
            exact.set_experts_implementation("eager")  # PyTorch has no grouped product in fp64
        small = ForwardCase(case.shape, "training", 2, 203, 3, 41, dtype=case.dtype)
        rows = Rows.of(small, config.vocab_size, device)
        stock, oracle = (_trained(one, "stock", rows, small) for one in (model, exact))
        for one in (small, replace(small, checkpointing=True)):
            ours = _trained(model, way, rows, one)
            for name, *parts in zip(("log-probabilities", "gradients"), ours, stock, oracle, strict=True):
                if red := _red(name, error_ratio(*parts)):
                    return red
    except Exception as error:
        return status_of(error)
    return None


def _trained(model: PreTrainedModel, way: str, rows: Rows, case: ForwardCase) -> tuple[Tensor, Tensor]:
    """Log-probabilities and all gradients."""
    with _prepared(model, case), using(model, way, rows, min_saved_tokens=1) as hidden:
        found = _pass(model, hidden, rows, case)
        _what_ran(model, rows, way)
        return found, torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
