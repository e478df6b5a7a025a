"""Rollouts of a model that processes divide, for ``torchrun --nproc-per-node 2 -m tests.parallel.rollouts_on_gpus``.

Each process has prompts of its own, of other lengths. Between rollouts all weights change a little, as in training.
Memory is what the driver has given to the process, with that of gathered parameters.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any

import torch
import typer
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode.files import write_rows
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.measurement.rows import provenance
from hf_fastdecode.measurement.shapes import random_model

_WAYS = ("ddp", "gathered", "stock")
"""Whole weights on each GPU and FSDP 2, enabled; FSDP 2, stock."""

_OF_ZERO = ("zero3", "zero3-gathered", "zero3-stock")
"""ZeRO-3, enabled, and while TRL has gathered parameters; stock. With DeepSpeed, and TRL, in PYTHONPATH."""


def divided(model: PreTrainedModel, way: str) -> Callable[[], AbstractContextManager[Any]]:
    """Divide a model; returns the context of its rollouts."""
    if way in _OF_ZERO:
        import deepspeed

        settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
        engine = deepspeed.initialize(model=model, config=settings)[0]
        return partial(_gathered_by_trl, engine) if way == "zero3-gathered" else nullcontext
    if way != "ddp":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return nullcontext


@contextmanager
def _gathered_by_trl(engine: Any) -> Iterator[None]:
    import deepspeed
    from trl.models.utils import add_hooks, remove_hooks

    with deepspeed.zero.GatheredParameters(engine.parameters()):
        remove_hooks(engine)
        yield
        add_hooks(engine)


@contextmanager
def most_used(device: torch.device) -> Iterator[list[int]]:
    """A list of one number, which is the most bytes in use on the device so far."""
    found, ends = [0], Event()

    def watch() -> None:
        while not ends.wait(0.02):
            free, total = torch.cuda.mem_get_info(device)
            found[0] = max(found[0], total - free)

    watcher = Thread(target=watch) if device.type == "cuda" else Thread()
    watcher.start()
    try:
        yield found
    finally:
        ends.set()
        watcher.join()


def main(
    out: Annotated[Path, typer.Option(help="CSV file of rows to write.")],
    way: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(_WAYS)} by default; {', '.join(_OF_ZERO)}.")
    ] = None,
    shape: Annotated[str, typer.Option(help="A shape of `python -m benchmarks generate`.")] = "qwen3-4b",
    prompts: Annotated[int, typer.Option(help="Prompts of a process.")] = 4,
    samples: Annotated[int, typer.Option(help="Completions of each prompt.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 1000,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a completion.")] = 256,
    rollouts: Annotated[int, typer.Option(help="Rollouts, of which the first is shown apart.", min=2)] = 4,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
) -> None:
    """Measure rollouts in each way, and write the slowest process's row."""
    rank = int(os.environ["LOCAL_RANK"])
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rows: list[dict[str, Any]] = []
    for name in way or _WAYS:
        model = random_model(shape, here, torch.bfloat16)
        ready, stock = divided(model, name), name.endswith("stock")
        if not stock:
            fd.enable(model)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        torch.manual_seed(rank)
        ids = torch.randint(3, model.config.vocab_size, (prompts, length - 7 * rank), device=here)
        given = {"do_sample": True, "top_k": 0, "num_return_sequences": samples, "synced_gpus": stock}
        took, gathers, before = [], [0.0], torch.cuda.memory_allocated(here) if device == "cuda" else 0
        with most_used(here) as most:
            for _ in range(rollouts):
                distributed.barrier()
                began = time.perf_counter()
                with ready():
                    model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, **given)
                took.append(time.perf_counter() - began)
                if (call := fd.explain(model).last_call) is not None and call.gathered is not None:
                    gathers.append(call.gathered[1])
                with torch.no_grad():
                    for parameter in model.parameters():
                        getattr(parameter, "ds_tensor", parameter).mul_(1.001)
        state, measured = state_of(model), provenance(here)
        row: dict[str, Any] = {"way": name, "shape": shape, "ranks": distributed.get_world_size()}
        row |= {"rows": prompts * samples, "first_s": took[0], "rollout_s": statistics.median(took[1:])}
        row |= {"gather_s": gathers[-1], "most_bytes": most[0], "bytes_before": before}
        if call is not None and state is not None:
            row |= {"ran": call.mode, "why": call.mode_reason, "captures": state.captures.made}
            row["fused"] = call.fused
            row["gathered_bytes"] = 0 if call.gathered is None else call.gathered[0]
        of_all: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(of_all, row)
        rows.append(max(of_all, key=lambda one: one["rollout_s"]))
        if rank == 0:
            write_rows(out, [measured | one for one in rows])
            print(rows[-1], flush=True)
        del model, state
    distributed.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
