"""DeepSpeed: an engine's model shares at ZeRO stages 0 to 2, and at stage 3 while TRL has gathered its parameters."""

from __future__ import annotations

import sys
from pathlib import Path

from ..fresh_processes import run_fresh

# Apart from other programs, which would import it where it is found.
DEEPSPEED = Path(sys.prefix) / "deepspeed"

CODE = """
import sys, warnings
warnings.simplefilter("ignore")
import deepspeed, torch
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # which it would compile
deepspeed.init_distributed(dist_backend="gloo")
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


def test_rollouts_share_at_every_stage():
    settings = {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run_fresh(f"import sys; sys.path.append({str(DEEPSPEED)!r})\n{CODE}", **settings)
    assert done.returncode == 0, done.stderr[-4000:]
