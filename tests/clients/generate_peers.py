"""``python -m tests.clients.generate_peers``: rows of vLLM beside those of `python -m benchmarks generate`.

Weights are random, drawn as transformers initializes them: vLLM's dummy weights make all rows choose the same experts,
or each row its own, and so read a part of the experts that ours do, or more.
Prompts are new in each call, since vLLM keeps the keys and values of earlier ones. Without network, set
``HF_HUB_OFFLINE=1``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
import typer
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.cli import options
from benchmarks.cli.generate import check_models, parse_calls
from benchmarks.generate.cases import GenerateCase
from benchmarks.generate.experts import mixtures_of
from hf_fastdecode.cli.options import TEMPERATURE, TOP_P, CsvFile, Repeats, check_choice
from hf_fastdecode.errors import InputError
from hf_fastdecode.files import read_rows, write_rows
from hf_fastdecode.measurement import calls as timed
from hf_fastdecode.measurement.rows import check_out, provenance, run
from hf_fastdecode.measurement.shapes import SHAPES, config_of, random_weights

from .forward_peers import imported
from .vllm_models import VLLM_SHAPES, VllmModel

ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process draws the weights and takes the time
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # needs a CUDA compiler
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo"),
}
"""What vLLM reads, for one GPU without network; variables that are set already stay."""


def main(
    out: CsvFile,
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(VLLM_SHAPES)}.")],
    point: Annotated[list[str] | None, options.points("none", trees=False, inputs=True)] = None,
    tree: options.Trees = None,
    new_tokens: options.NewTokens = 65,
    repeats: Repeats = 3,
    warm_up: options.WarmUp = None,
    kv_gib: Annotated[float, typer.Option(help="GiB of the cache, all that is reserved.", min=0.1)] = 20.0,
    wait: Annotated[
        Path | None, typer.Option(help="Measure when this file exists: engines load side by side, measure in turn.")
    ] = None,
    count_experts: Annotated[
        bool, typer.Option("--count-experts", help="Count experts of steps, eagerly, for rows that OUT has already.")
    ] = False,
) -> None:
    """Measure vLLM on calls of a shape, and write each row when it is measured."""
    check_choice("shape", [shape], VLLM_SHAPES)
    cases = parse_calls([shape], point, tree, [], new_tokens, "bfloat16")
    experts = experts_of(shape) if count_experts else []
    if not cases:
        raise InputError("there is nothing to measure; name a --point or a --tree")
    if count_experts and not experts:
        raise InputError(f"--count-experts is for mixtures of experts, which {shape} is not; leave it out")
    check_models(cases, "cuda", torch.device("cuda"))
    check_out(out)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(VllmModel(shape), cases, Path(folder), kv_gib, count_experts=count_experts)
        while wait is not None and not wait.exists():
            time.sleep(0.2)
        if count_experts:
            return add_experts(out, cases, engine, experts)
        measure = partial(measured, engine, repeats, warm_up)
        run(cases, ["vllm"], lambda case, _: measure(case), provenance=provenance(engine.device), out=out)


class Engine:
    """vLLM with a model of random weights in a folder, for calls of the longest of the cases."""

    def __init__(
        self, model: VllmModel, cases: Sequence[GenerateCase], folder: Path, kv_gib: float, *, count_experts: bool
    ):
        os.environ.update(ENVIRONMENT | os.environ)
        self.vllm, self.model, self._draw = imported("vllm"), model, np.random.default_rng(0)
        if model.stand_in:  # has no experts, which this method, for balancing them, refuses
            imported("vllm.model_executor.models.qwen3_next").Qwen3NextForCausalLM.set_moe_parameters = lambda _: None
        sizes = sorted({1, 16, 32, 64, 128, *(case.samples for case in cases)})
        model.write(folder)
        draw = partial(draw_weights, std=model.config.get_text_config().initializer_range)
        loader = imported("vllm.model_executor.model_loader.dummy_loader").DummyModelLoader
        loader.load_weights = lambda _, model, __: draw(model)  # before products of weights are made, and captured
        self.llm = self.vllm.LLM(
            **{"model": str(folder), "load_format": "dummy", "dtype": "bfloat16", "seed": 0},
            **{"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": int(kv_gib * 2**30)},
            **{"max_num_seqs": sizes[-1], "max_num_batched_tokens": 16384, "enable_prefix_caching": True},
            **({"enable_return_routed_experts": True} if count_experts else {"cudagraph_capture_sizes": sizes}),
            **({"limit_mm_per_prompt": {"image": 1, "video": 0}} if model.images else {"skip_tokenizer_init": True}),
            max_model_len=max(case.context + case.new_tokens for case in cases),
            generation_config="vllm",  # else transformers' settings of a model type
            enforce_eager=count_experts,
            gdn_prefill_backend="triton",
            kernel_config={"enable_flashinfer_autotune": False},
        )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def inputs(self, case: GenerateCase) -> Sequence[Any]:
        """Prompts that vLLM has not seen; images are resized and normalized, as ours are before the time is taken."""
        prompts = self.model.prompts(case, self._draw)
        return prompts if self.model.images is None else list(self.llm._preprocess_cmpl(prompts))

    def call(self, case: GenerateCase, inputs: Sequence[Any], new_tokens: int) -> list[Any]:
        """The completion of each row, of exactly `new_tokens` tokens."""
        drawing = {"temperature": TEMPERATURE, "top_p": TOP_P, "top_k": -1, "ignore_eos": True, "detokenize": False}
        sampling = self.vllm.SamplingParams(n=case.samples // case.prompts, max_tokens=new_tokens, **drawing)
        if self.model.images is None:
            outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        else:  # the same of what the processor has made
            self.llm._render_and_add_requests(prompts=inputs, params=[sampling] * len(inputs))
            outputs = self.llm._run_engine(self.vllm.RequestOutput, use_tqdm=False)
        rows = [row for output in outputs for row in output.outputs]
        lengths = [len(row.token_ids) for row in rows], {len(output.prompt_token_ids) for output in outputs}
        if lengths != ([new_tokens] * case.samples, {case.context}):
            raise RuntimeError(f"vLLM drew other rows than {case}: {lengths}")
        return rows

    def ran(self) -> str:
        config = self.llm.llm_engine.vllm_config
        mode, graphs = config.compilation_config.mode, config.compilation_config.cudagraph_mode
        words = [f"vLLM {self.vllm.__version__}", f"V{2 if config.use_v2_model_runner else 1} model runner"]
        words += [f"torch.compile mode {int(mode or 0)}", f"CUDA graphs {graphs.name}"]
        words += ["async scheduling"] if config.scheduler_config.async_scheduling else []
        words += ["as Qwen3-Next without experts"] if self.model.stand_in else []
        return ", ".join(words)


def draw_weights(model: nn.Module, std: float) -> None:
    """Draw weights; norms keep what they are made with, and biases are 0."""
    torch.manual_seed(0)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.data.normal_(0, std)
            elif "Norm" not in type(module).__name__:
                parameter.data.zero_()


def measured(engine: Engine, repeats: int, warm_up: int | None, case: GenerateCase) -> dict[str, Any]:
    """The columns of a case as `benchmarks.generate.measure.GenerateBench` has them."""

    def seconds(new_tokens: int, repeats: int = repeats) -> list[float]:
        fresh = [engine.inputs(case) for _ in range(repeats)]
        call = lambda: engine.call(case, fresh.pop(), new_tokens)  # noqa: E731
        return timed.wall_samples(call, engine.device, repeats=repeats, budget_s=20)

    def measure() -> dict[str, Any]:
        (first,), _ = seconds(min(case.new_tokens, warm_up or case.new_tokens), 1), seconds(1, 1)
        return columns(case, first, seconds(1), seconds(case.new_tokens)) | {"ran": engine.ran()}

    return timed.guarded((), measure)


def columns(case: GenerateCase, first: float, prefills: Sequence[float], whole: Sequence[float]) -> dict[str, Any]:
    """Columns from seconds of the first call, of calls of one token, and of whole calls."""
    prefill, steps = timed.percentiles(prefills).p50, case.new_tokens - 1
    times = {"prefill_s": prefill, "total_s": timed.percentiles(whole).p50, "first_call_s": first, "steps": steps}
    return timed.step_columns([seconds - prefill for seconds in whole], steps, steps * case.samples) | times


def experts_of(shape: str) -> list[int]:
    """The number of experts of each layer that has some."""
    if shape not in SHAPES:
        return []
    model = random_weights(AutoModelForCausalLM, config_of(shape, torch.bfloat16), "meta", torch.bfloat16)
    return [len(module.gate_up_proj) for module in mixtures_of(model)]


def add_experts(out: Path, cases: Sequence[GenerateCase], engine: Engine, experts: Sequence[int]) -> None:
    """Count experts of the cases for the rows of `out` that were measured before."""
    for case in cases:
        same = {name: str(value) for name, value in case.columns().items()} | {"way": "vllm"}
        rows = read_rows(out) if out.exists() else []
        row = next((row for row in rows if same.items() <= row.items()), None)
        if row is None:
            raise InputError(f"{out} has no row of {same}; measure it first, without --count-experts")
        steps = case.new_tokens - 1  # the last token runs through no layer
        chosen = [one.routed_experts[-steps:] for one in engine.call(case, engine.inputs(case), case.new_tokens)]
        row |= {"experts": str(mean_experts(np.stack(chosen), len(experts))), "of_experts": str(experts[0])}
        write_rows(out, rows)


def mean_experts(chosen: np.ndarray[Any, Any], layers: int) -> float:
    """How many experts of a layer the rows of a step choose, the mean of steps and of the `layers` that have some.

    Args:
        chosen: ``[rows, steps, layers, experts of a token]``, zeros where a layer has none.
    """
    found = chosen[:, :, (chosen[..., 0] != chosen[..., 1]).any((0, 1))]
    if found.shape[2] != layers:
        raise RuntimeError(f"vLLM told the experts of {found.shape[2]} layers, and {layers} have some")
    return float(np.mean([len(np.unique(found[:, step, at])) for step, at in np.ndindex(found.shape[1:3])]))


if __name__ == "__main__":
    try:
        typer.run(main)
    except SystemExit as leaving:
        sys.stdout.flush()
        os._exit(int(leaving.code or 0))  # else threads of vLLM's may keep the process
