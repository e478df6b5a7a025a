"""`generate` measured end to end: stock and shared, prefill apart from decode, with the memory that both take.

``python -m hf_fastdecode.bench.generate --help`` runs it. A case refuses to be measured unless shared decoding gives
stock's tokens on the device in fp32.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode.cache.accounting import KVShape
from hf_fastdecode.cache.shared import cache_bytes

from .rows import provenance, write_rows
from .shapes import SHAPES, random_model

RESULTS = Path(__file__).parent / "results"
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}


@dataclass(frozen=True)
class Case:
    """One setting: `samples` completions of `new_tokens` tokens after a prompt of `context` tokens."""

    shape: str
    context: int
    samples: int
    new_tokens: int
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Measurement:
    """What one way of generating took; times are medians, with the 20th and 80th percentile behind.

    Attributes:
        way: ``stock`` or ``shared``.
        prefill_s: Seconds to the first token of all samples.
        single_prefill_s: Seconds that stock takes to the first token of one sample.
        ms_per_step: ``(time(new_tokens) - time(1)) / (new_tokens - 1)``, in milliseconds.
        total_s: Seconds of the whole call.
        kv_bytes: Memory held by the cache at the end of the call, measured on CUDA, counted on the CPU.
        floor_kv_bytes: Bytes of keys and values of ``context + samples * new_tokens`` tokens.
        peak_bytes: Most memory taken over the weights during the call; CUDA only.
        embedded_tokens: Tokens that went through the embedding layer in the whole call.
        status: ``ok`` or ``out of memory``.
    """

    way: str
    status: str = "ok"
    prefill_s: float | None = None
    single_prefill_s: float | None = None
    ms_per_step: float | None = None
    ms_per_step_p20: float | None = None
    ms_per_step_p80: float | None = None
    total_s: float | None = None
    kv_bytes: int | None = None
    floor_kv_bytes: int | None = None
    peak_bytes: int | None = None
    embedded_tokens: int | None = None


def measure(model: PreTrainedModel, case: Case, way: str, repeats: int) -> Measurement:
    """Measure one way of running a case; running out of memory is a result, not an error."""
    ids = _prompt(model, case.context)
    try:
        with _way(model, way):
            call = _caller(model, ids, case.samples)
            call(1)
            call(2)  # the decode path's own warm-up: library handles, algorithm choices
            first = [_seconds(lambda: call(1), model.device) for _ in range(repeats)]
            whole = [_seconds(lambda: call(case.new_tokens), model.device) for _ in range(repeats)]
            kv_bytes, peak_bytes, embedded = _footprint(model, lambda: call(case.new_tokens, return_dict=True))
    except torch.OutOfMemoryError:
        _collect()
        return Measurement(way, status="out of memory")
    prefill = statistics.median(first)
    steps = sorted(1e3 * (total - prefill) / (case.new_tokens - 1) for total in whole)
    return Measurement(
        way,
        prefill_s=prefill,
        single_prefill_s=_single_prefill(model, ids, repeats),
        ms_per_step=statistics.median(steps),
        ms_per_step_p20=steps[round(0.2 * (len(steps) - 1))],
        ms_per_step_p80=steps[round(0.8 * (len(steps) - 1))],
        total_s=statistics.median(whole),
        kv_bytes=kv_bytes,
        floor_kv_bytes=(case.context + case.samples * case.new_tokens)
        * KVShape.from_config(model.config).bytes_per_token(model.dtype.itemsize),
        peak_bytes=peak_bytes,
        embedded_tokens=embedded,
    )


def check_tokens(device: torch.device | str) -> None:
    """Compare shared with stock decoding on the device, in fp32.

    Raises:
        RuntimeError: The tokens differ; nothing should be measured.
    """
    model = random_model("tiny", device, torch.float32)
    call = _caller(model, _prompt(model, 200), 8)
    tokens = []
    for way in ("stock", "shared"):
        torch.manual_seed(0)
        with _way(model, way):
            tokens.append(call(24))
    if not torch.equal(*tokens):
        raise RuntimeError(f"shared decoding gave other tokens than stock on {device}; not measuring")


def same_tokens(model: PreTrainedModel, case: Case) -> bool:
    """Whether stock and shared decoding give equal tokens from one seed on this very case."""
    call = _caller(model, _prompt(model, case.context), case.samples)
    tokens = []
    for way in ("stock", "shared"):
        torch.manual_seed(0)
        with _way(model, way):
            tokens.append(call(case.new_tokens))
    return torch.equal(*tokens)


def run(cases: list[Case], *, device: str, repeats: int) -> Iterator[dict[str, Any]]:
    """Measure cases, stock and shared, and yield one row for each."""
    check_tokens(device)
    loaded: tuple[str, PreTrainedModel] | None = None
    for case in tqdm(cases, desc="cases", unit="case"):
        if loaded is None or loaded[0] != case.shape:
            loaded = None
            _collect()
            loaded = case.shape, load(case.shape, device, getattr(torch, case.dtype))
        model = loaded[1]
        for way in ("stock", "shared"):
            yield provenance(device) | asdict(case) | asdict(measure(model, case, way, repeats))
        if case.dtype == "float32" and not same_tokens(model, case):
            raise RuntimeError(f"shared decoding gave other tokens than stock in {case}")


def load(shape: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a shape: ``embedded`` is the trained one that the package carries."""
    if shape == "embedded":
        model, _ = fd.load_embedded(dtype=dtype, device=device)
        model.generation_config.eos_token_id = None  # every sample runs to the end, so that steps are comparable
        return model
    return random_model(shape, device, dtype)


def _prompt(model: PreTrainedModel, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.config.vocab_size, (1, length), generator=generator)
    return ids.to(model.device)


def _caller(model: PreTrainedModel, ids: Tensor, samples: int) -> Callable[..., Any]:
    def call(new_tokens: int, return_dict: bool = False) -> Any:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_return_sequences=samples,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            return_dict_in_generate=return_dict,
            **SAMPLING,
        )

    return call


def _way(model: PreTrainedModel, way: str) -> AbstractContextManager[Any]:
    return fd.enabled(model) if way == "shared" else nullcontext()


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    call()
    _synchronize(device)
    return time.perf_counter() - start


def _single_prefill(model: PreTrainedModel, ids: Tensor, repeats: int) -> float:
    call = _caller(model, ids, 1)
    call(1)
    return statistics.median(_seconds(lambda: call(1), model.device) for _ in range(repeats))


def _footprint(model: PreTrainedModel, call: Callable[[], Any]) -> tuple[int, int | None, int]:
    """Bytes held by the cache that a call returns, its peak over the memory before, and the tokens embedded."""
    counted: list[int] = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: counted.append(args[0].numel())
    )
    cuda = model.device.type == "cuda"
    _collect()
    before = torch.cuda.memory_allocated(model.device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    try:
        cache = call().past_key_values
    finally:
        hook.remove()
    if not cuda:
        return cache_bytes(cache), None, sum(counted)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    gc.collect()
    return torch.cuda.memory_allocated(model.device) - before, peak, sum(counted)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _point(text: str) -> tuple[int, int]:
    context, cross, samples = text.partition("x")
    if not (cross and context.isdigit() and samples.isdigit() and int(context) and int(samples)):
        raise typer.BadParameter(f"a point is CONTEXTxN, such as 2048x16, got {text!r}")
    return int(context), int(samples)


def main(
    shape: Annotated[list[str], typer.Option(help=f"Model shape, repeatable: {', '.join(SHAPES)} or embedded.")],
    point: Annotated[list[str], typer.Option(help="CONTEXTxN: tokens of the prompt and samples of it, repeatable.")],
    new_tokens: Annotated[int, typer.Option(help="Tokens drawn for each sample.", min=2)] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    repeats: Annotated[int, typer.Option(help="Timed runs of each call.", min=1)] = 3,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("runs/generate.csv"),
) -> None:
    """Measure generate at every point of every shape, stock beside shared."""
    cases = [Case(name, *_point(text), new_tokens, dtype) for name in shape for text in point]
    rows: list[dict[str, Any]] = []
    for row in run(cases, device=device, repeats=repeats):
        rows.append(row)
        write_rows(out, rows)
        brief = (
            "shape",
            "context",
            "samples",
            "way",
            "status",
            "prefill_s",
            "single_prefill_s",
            "ms_per_step",
            "total_s",
        )
        tqdm.write(
            "  ".join(
                f"{name}={row[name]:.4g}" if isinstance(row[name], float) else f"{name}={row[name]}" for name in brief
            )
        )


if __name__ == "__main__":
    typer.run(main)
