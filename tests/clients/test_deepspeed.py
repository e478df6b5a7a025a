"""DeepSpeed: an engine's model shares at ZeRO stages 0 to 2, and at stage 3 while TRL has gathered its parameters.

Two processes that divide gradients and optimizer share other numbers of tokens in their training steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from socket import socket

from ..fresh_processes import run_fresh

# Apart from other programs, which would import it where it is found.
DEEPSPEED = Path(sys.prefix) / "deepspeed"

START = """
import os, sys, warnings
warnings.simplefilter("ignore")
import deepspeed, torch, tests.tiny_models
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # which it would compile
if os.environ["WORLD_SIZE"] == "2" and os.fork() == 0:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "1"
deepspeed.init_distributed(dist_backend="gloo")
"""
ROLLOUTS = """
from trl.models.utils import add_hooks, remove_hooks
import hf_fastdecode as fd
from tests.generation.calls import PROMPT, SAMPLING
from tests.tiny_models import seeded, tiny_model

def rollout(engine):
    tokens = seeded(lambda: engine.module.generate(**PROMPT, **SAMPLING)).tolist()
    call = fd.explain(engine).last_call
    return tokens, call and f"{call.path}: {call.reason}"

for stage in range(4):
    model = tiny_model()
    settings = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    stock, _ = rollout(engine)
    fd.enable(engine, min_saved_tokens=64)
    tokens, said = rollout(engine)
    assert tokens == stock
    assert said.startswith("stock: ZeRO-3 divides its parameters" if stage == 3 else "shared: "), said
    if stage == 3:
        with deepspeed.zero.GatheredParameters(engine.parameters()):
            remove_hooks(engine)
            tokens, said = rollout(engine)
            add_hooks(engine)
        assert tokens == stock
        assert said.startswith("shared: "), said
        assert rollout(engine)[1].startswith("stock: ZeRO-3")
"""


STEPS = """
from contextlib import nullcontext
import hf_fastdecode as fd
from tests.parallel.shared_rows import batch
from tests.tiny_models import tiny_model

RANK = int(os.environ["RANK"])

def train(enable):
    model = tiny_model().train()
    settings = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    losses, paths = [], []
    with fd.enabled(engine, min_saved_tokens=8) if enable else nullcontext():
        for step in range(3):
            loss = engine(**batch(RANK, step), use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            paths.append(enable and fd.explain(engine).last_forward.path)
    return torch.tensor(losses), [value.detach() for value in model.parameters()], paths

def apart(expected, found):
    return ((expected - found).abs().max() / expected.abs().max()).item()

losses, parameters, _ = train(False)
found_losses, found, paths = train(True)
assert paths == ["shared", "shared", "stock" if RANK == 0 else "shared"], paths
assert apart(losses, found_losses) <= 1e-5
assert max(map(apart, parameters, found)) <= 1e-5
moved = max(map(apart, tiny_model().parameters(), parameters))
assert moved > 1e-2, moved
torch.distributed.barrier()
if RANK == 0:
    assert os.wait()[1] == 0
else:
    os._exit(0)
"""


def run_code(code: str, world_size: int) -> None:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    settings = {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    done = run_fresh(f"import sys; sys.path.append({str(DEEPSPEED)!r})\n{START}{code}", **settings)
    assert done.returncode == 0, done.stderr[-4000:]


def test_rollouts_share_at_every_stage():
    run_code(ROLLOUTS, 1)


def test_steps_of_two_processes_at_stage_2_are_those_of_stock():
    run_code(STEPS, 2)
