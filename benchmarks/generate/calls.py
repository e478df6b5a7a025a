"""Calls of `generate` to measure: the model and the prompts of a case, functions that draw, and the check of a way.

In fp32 tokens must be stock's, for one seed. In half precision no two kernels round alike, so the error of the logits
that the way chose its tokens by counts: against the model in fp64 it is at most twice stock's own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.cache.layout import ModelLayout
from hf_fastdecode.generation.decoding.stopping import RowLengthCriteria
from hf_fastdecode.kernels.device import triton_is_installed
from hf_fastdecode.measurement.calls import seeded, what_ran
from hf_fastdecode.measurement.rows import NotAvailableError, status_of
from hf_fastdecode.measurement.shapes import SHAPES, random_model
from hf_fastdecode.model_loading import load_weights
from hf_fastdecode.patches.config_base import SlimLayer

from ..ops.inputs import BOUND
from ..slim.cases import RANK_DIVISOR
from .cases import GenerateCase
from .quantized import QUANTIZERS, dequantized, quantize
from .shapes import INPUT_SHAPES, given_of, split_shape
from .ways import GenerateWay, using


def load(shape: str, device: torch.device, dtype: torch.dtype, slim: str | None = None) -> PreTrainedModel:
    """The model of a shape: random weights, ``embedded`` for the one that the package carries, or a checkpoint.

    Every sample of it runs to the end, so that steps are comparable. With `slim`, the plan of every layer, it is a
    slim model with random weights. Raises InputError without such a checkpoint, NotAvailableError for a shape
    without a slim form, or one whose weights cannot be quantized as its name says.
    """
    shape, how = split_shape(shape)
    if how is not None:
        model = load(shape, device, dtype, slim)
        quantize(model, how)
        return model
    if slim is not None:
        fields = SHAPES.get(shape, {})
        if not fields or fields["num_key_value_heads"] != fields["num_attention_heads"]:
            raise NotAvailableError(
                "slim ways need a named shape with as many KV heads as query heads, since each head's values are made "
                f"of all keys, got {shape}; choose 7b-mha, 13b-mha or tiny-mha"
            )
        rank = fields["hidden_size"] // RANK_DIVISOR if slim == "k+r" else 0
        return random_model(shape, device, dtype, SlimLayer(slim, rank))
    if shape in SHAPES:
        return random_model(shape, device, dtype)
    if shape in INPUT_SHAPES:
        return INPUT_SHAPES[shape].model(device, dtype)
    model = load_weights(shape, dtype, device)
    end = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(pad_token_id=end[0] if isinstance(end, list) else end or 0)
    return model


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of a token's keys and values in all layers; of a slim model those of the ordinary one.

    With an encoder, of a token that the decoder reads or draws.
    """
    layout = ModelLayout.from_config(model.config)
    if layout.states or layout.cross:
        return model.dtype.itemsize * sum(store.numbers for store in layout.per_token.values())
    config = copy.copy(model.config)
    config.slim_layers = None
    return KVSizes.from_config(config).bytes_per_token(model.dtype.itemsize)


def floor_kv_bytes(model: PreTrainedModel, case: GenerateCase) -> int:
    """Bytes of keys and values of the prompts' tokens once, of an encoder's tokens once, and of every sample's."""
    layout, per_token = ModelLayout.from_config(model.config), kv_bytes_per_token(model)
    if not layout.cross:
        return (case.prompt_tokens + sum(case.lengths())) * per_token
    encoded = case.context * model.dtype.itemsize * sum(store.numbers for store in layout.cross.values())
    return encoded + (given_of(case.shape).prompt_length(case) + sum(case.lengths())) * per_token


def caller(
    model: PreTrainedModel, case: GenerateCase, way: GenerateWay, *, stopping: StoppingCriteria | None = None
) -> Callable[..., Any]:
    """A function that generates so many tokens for a case's samples, with a way's arguments and a further criterion.

    Raises NotAvailableError where the way does not take this case.
    """
    if way.beams and (case.finish or case.tree is not None):
        raise NotAvailableError("beams are of one prompt, and run to the end")
    if way.single and case.samples > 1:
        raise NotAvailableError(f"it takes one sample, got {case.samples}")
    given = given_of(case.shape)
    inputs = given.arguments(model, case)
    extra: dict[str, Any] = {}
    criteria: list[StoppingCriteria] = [stopping] if stopping is not None else []
    if case.finish:
        extra["pad_token_id"] = 0
        criteria.append(
            RowLengthCriteria(given.prompt_length(case), torch.tensor(case.lengths(), device=model.device))
        )
    if criteria:
        extra["stopping_criteria"] = StoppingCriteriaList(criteria)

    def call(new_tokens: int, return_dict: bool = False) -> Any:
        drawing = given.drawing(way.call_arguments(case.samples // case.prompts), new_tokens)
        arguments = {"return_dict_in_generate": return_dict, **drawing, **extra}
        output = model.generate(**inputs, **arguments)
        return output.sequences if arguments["return_dict_in_generate"] and not return_dict else output

    return call


_ROWS, _TOKENS = 8, 24
_TEXT = GenerateCase("tiny", 200, _ROWS, _TOKENS)


def check_way(way: GenerateWay, device: torch.device, dtype: torch.dtype, case: GenerateCase = _TEXT) -> str | None:
    """Check one of our ways on a tiny random model (see `small_case`); None when it is right, else a status."""
    # Who draws is not checked here: the fast sampler keeps no logits, and has tests of its own. So have rows that
    # wait, of which no logits are returned.
    kept = {name: value for name, value in (way.enable or {}).items() if name not in ("sampler", "max_rows")}
    way = replace(way, enable=kept)
    how = split_shape(case.shape)[1]
    in_fp32 = QUANTIZERS[how].in_fp32 if how else not (way.half and device.type == "cuda")
    try:
        if in_fp32 and not gives_stock_tokens(way, device, case):
            return f"wrong: other tokens than stock in fp32 on {device}"
        if dtype != torch.float32 and not (ratio := logits_error(way, device, dtype, case)) <= BOUND:
            return f"wrong: logits err {ratio:.2f} times stock's error in {dtype}, at most {BOUND:g} is right"
    except Exception as error:
        return status_of(error)
    return None


def small_case(shape: str) -> GenerateCase:
    """A case for checks of ways of a shape: of a tiny one that is given the like, with weights of the same kind."""
    shape, how = split_shape(shape)
    if how is not None:
        case = small_case(shape)
        return replace(case, shape=f"{'tiny-experts' if how == 'mxfp4' else case.shape}:{how}")
    if shape not in INPUT_SHAPES:
        return _TEXT
    small = INPUT_SHAPES[shape].small
    return GenerateCase(small, INPUT_SHAPES[small].context, _ROWS, _TOKENS)


def gives_stock_tokens(way: GenerateWay, device: torch.device, case: GenerateCase = _TEXT) -> bool:
    """Whether stock and the way draw the same tokens in fp32; NotAvailableError where the way runs stock."""
    model = _tiny(case, way, device, torch.float32)
    arguments = way.call_arguments(1 if way.single else case.samples)
    stock = _generate(model, case, arguments)
    with using(model, way):
        ours = _generate(model, case, arguments)
        what_ran(model)
    return torch.equal(stock, ours)


def logits_error(way: GenerateWay, device: torch.device, dtype: torch.dtype, case: GenerateCase = _TEXT) -> float:
    """Error of the way's logits on its own tokens against the model in fp64, in multiples of stock's error.

    Raises NotAvailableError where the way runs stock.
    """
    model = _tiny(case, way, device, dtype)
    with using(model, way):
        record = _Recorder()
        sequences = _generate(model, case, GenerateWay().call_arguments(case.samples), logits_processor=[record])
        what_ran(model)
    found = torch.stack(record.logits, 1)  # [rows, tokens, vocabulary]
    drawn, shown = sequences[:, -case.new_tokens :], found.isfinite()  # but for suppressed tokens
    plain = dequantized(model) if split_shape(case.shape)[1] else copy.deepcopy(model)
    oracle = _logits(plain.double(), case, drawn)[shown]
    ours, theirs = found[shown] - oracle, _logits(model, case, drawn)[shown] - oracle
    return float(torch.maximum(ours.abs().max() / theirs.abs().max(), ours.norm() / theirs.norm()))


class _Recorder(LogitsProcessor):
    """Keeps the logits of each step, and leaves them as they are: not all calls can return them and share context."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits.append(scores.double())
        return scores


def _tiny(case: GenerateCase, way: GenerateWay, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    return load(case.shape if way.slim is None else "tiny-mha", device, dtype, way.slim)


@torch.no_grad()
def _logits(model: PreTrainedModel, case: GenerateCase, sequences: Tensor) -> Tensor:
    """The logits that each drawn token was chosen by, ``[rows, tokens, vocabulary]`` fp64."""
    return given_of(case.shape).logits(model, case, sequences).double()


def _generate(model: PreTrainedModel, case: GenerateCase, arguments: dict[str, Any], **more: Any) -> Tensor:
    given = given_of(case.shape)
    inputs, drawing = given.arguments(model, case), given.drawing(arguments, case.new_tokens)
    with seeded(model.device):
        output: Any = model.generate(**inputs, **drawing, **more)
    sequences: Tensor = output if isinstance(output, Tensor) else output.sequences
    return sequences


@contextmanager
def compilations() -> Iterator[list[float]]:
    """Within, the seconds of each kernel that Triton compiles, in any thread; not of those that are found on disk."""
    found: list[float] = []

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            found.append(times.total / 1e6)

    if not triton_is_installed():
        yield found
        return
    from triton import knobs

    with knobs.compilation.scope():
        knobs.compilation.listener = listen
        yield found
