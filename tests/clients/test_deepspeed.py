"""DeepSpeed: an engine's model shares at all ZeRO stages; at stage 3 its parameters are gathered for each call.

Two processes that divide gradients and optimizer share other numbers of tokens in their training steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ..fresh_processes import run_fresh
from ..ports import place_of

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
from contextlib import nullcontext
from unittest import mock
import pytest
from trl.models.utils import add_hooks, remove_hooks
import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.interception.switches import linear_of_torch
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.snapshot import captured_state
from hf_fastdecode.generation.steps.graph_capture import FusedProjections
from hf_fastdecode.parallel.gathering import memory, parameters, zero
from tests.parallel.scenarios import PROMPT, draw
from tests.parallel.test_gathered_parameters import SAMPLES, Raising, allocated, place
from tests.tiny_models import tiny_model

RANK = torch.distributed.get_rank()
IDS = PROMPT[:, 7 * RANK :].contiguous()  # of another length on each rank, whose samples end at other steps
BYTES = 4 * sum(one.numel() for one in tiny_model().parameters())

def engine_of(stage, **options):
    model = tiny_model()
    settings = {"train_batch_size": torch.distributed.get_world_size(), "train_micro_batch_size_per_gpu": 1}
    settings |= {"zero_optimization": {"stage": stage, "stage3_prefetch_bucket_size": 0, **options}}
    settings |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]

def whole(engine):
    twin = tiny_model()
    with deepspeed.zero.GatheredParameters(engine.parameters()), torch.no_grad():
        for mine, theirs in zip(twin.parameters(), engine.parameters(), strict=True):
            mine.copy_(theirs)
    return twin

def step(engine):
    engine.backward(engine(input_ids=IDS, labels=IDS, use_cache=False).loss)
    engine.step()

def rollout(engine, expected, gathers, path="shared"):
    before = place(engine.module)
    assert draw(engine.module, RANK, IDS, **SAMPLES) == expected
    assert place(engine.module) == before
    call = fd.explain(engine).last_call
    assert call.path == path, call
    assert (call.gathered and call.gathered.nbytes) == gathers, call.gathered

"""
SEVERAL = """
expected = draw(tiny_model(), RANK, IDS, **SAMPLES)
for stage in range(3):
    engine = engine_of(stage)
    with fd.enabled(engine, min_saved_tokens=1):
        rollout(engine, expected, None)
for threshold in (0, 100):  # below which parameters stay gathered
    engine, twin = (engine_of(3, stage3_param_persistence_threshold=threshold) for _ in range(2))
    with fd.enabled(engine, min_saved_tokens=1 if RANK else 10_000):
        rollout(engine, expected, BYTES, "shared" if RANK else "stock")
    with fd.enabled(engine, min_saved_tokens=1, reuse_prefix=True):
        rollout(engine, expected, BYTES)
        with deepspeed.zero.GatheredParameters(engine.parameters()):
            rollout(engine, expected, 0)  # with hooks
            remove_hooks(engine)  # as TRL does, all but one
            rollout(engine, expected, 0)
            with mock.patch.object(zero, "_copies", return_value=True):  # as on a GPU
                rollout(engine, expected, BYTES)
            add_hooks(engine)
        rollout(engine, expected, BYTES)  # of other tensors than the last
        rollout(engine, expected, BYTES)
        assert fd.explain(engine).last_call.known_tokens == (IDS.shape[1],)
        if RANK:
            with pytest.raises(KeyboardInterrupt):
                draw(engine.module, 0, IDS, stopping_criteria=[Raising(KeyboardInterrupt())], **SAMPLES)
        else:
            draw(engine.module, 0, IDS, **SAMPLES)
        step(engine)
        step(twin)
        moved = whole(engine)
        assert all(map(torch.equal, moved.parameters(), whole(twin).parameters()))
        changed = draw(moved, RANK, IDS, **SAMPLES)
        assert changed != expected
        rollout(engine, changed, BYTES)
        assert fd.explain(engine).last_call.known_tokens in (None, (0,))
        with deepspeed.zero.GatheredParameters(engine.parameters()) if threshold else nullcontext():
            cache = fd.prefill(engine.module, [IDS[0, row:-1] for row in range(1 + 3 * RANK)])
            assert draw(engine.module, RANK, IDS, **SAMPLES, **{CACHE: cache}) == changed
        assert fd.explain(engine).last_call.known_tokens == (IDS.shape[1] - 1,)
        step(engine)
        step(twin)
        with pytest.raises(ValueError, match="weights"):
            draw(engine.module, RANK, IDS, **SAMPLES, **{CACHE: cache})
        changed = draw(whole(engine), RANK, IDS, **SAMPLES)
    short = mock.Mock(side_effect=Unsupported("memory is short") if RANK else None)
    with fd.enabled(engine, min_saved_tokens=1), mock.patch.object(parameters, "_check_room", short):
        assert draw(engine.module, RANK, IDS, **SAMPLES) == changed
        assert "memory is short" in fd.explain(engine).last_call.reason
        with pytest.raises(ValueError, match="ZeRO-3 divides its parameters .*memory is short"):
            fd.prefill(engine.module, [IDS[0, row:] for row in range(1 + 3 * RANK)])
        step(engine)
        step(twin)
        assert all(map(torch.equal, whole(engine).parameters(), whole(twin).parameters()))
if RANK == 0:
    assert os.wait()[1] == 0
else:
    os._exit(0)
"""
ONE = """
expected = draw(tiny_model(), RANK, IDS, **SAMPLES)
engine = engine_of(3, stage3_param_persistence_threshold=0)
model, replaced, linear = engine.module, torch.nn.functional.linear, lambda: torch.nn.functional.linear

def baked_in(context):
    # What captured steps rely on, in a call
    with context, state_of(model).gathered(model):
        return captured_state(model, [model.config])

with fd.enabled(model), mock.patch.object(memory, "_PAGES", False):  # which PyTorch's allocator does not count
    most, left = allocated(lambda: draw(model, RANK, IDS, **SAMPLES))
    assert most > BYTES and left < 2**12, (most, left)
with fd.enabled(model, min_saved_tokens=1):
    rollout(engine, expected, BYTES)
    divided = baked_in(nullcontext())
    step(engine)
    assert divided == baked_in(nullcontext())
    with mock.patch.object(zero, "_copies", return_value=True):
        gathered = baked_in(deepspeed.zero.GatheredParameters(engine.parameters()))
        step(engine)
        assert gathered == baked_in(deepspeed.zero.GatheredParameters(engine.parameters()))
    rollout(engine, draw(whole(engine), RANK, IDS, **SAMPLES), BYTES)
    with fd.enabled(alone := tiny_model(), min_saved_tokens=1):  # of which DeepSpeed knows nothing
        for one in (model, alone):  # kernels run
            with state_of(one).gathered(one), torch.no_grad(), linear_of_torch():
                assert str(FusedModules(one)) == str(FusedModules(tiny_model())) != ""
                projections = FusedProjections(one)
                with projections, mock.patch.object(projections._products, "linears", return_value=None) as products:
                    one(input_ids=IDS)
                assert products.call_count == 2 * 4 + 1, products.call_count
            silu, called = torch.nn.functional.silu, set()
            with mock.patch.object(torch.nn.functional, "silu", lambda *a: called.add(linear()) or silu(*a)):
                draw(one, RANK, IDS, **SAMPLES)
            assert fd.explain(one).last_call.path == "shared"
            assert called and replaced not in called, called
        with linear_of_torch():
            assert alone(input_ids=IDS).logits.grad_fn is not None
assert torch.nn.functional.linear is replaced is not torch._C._nn.linear
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
    settings = place_of(world_size) | {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0"}
    done = run_fresh(f"import sys; sys.path.append({str(DEEPSPEED)!r})\n{START}{code}", **settings)
    assert done.returncode == 0, done.stderr[-4000:]


def test_rollouts_share_at_every_stage():
    run_code(ROLLOUTS + SEVERAL, 2)


def test_parameters_of_one_process_are_gathered_once():
    run_code(ROLLOUTS + ONE, 1)


def test_steps_of_two_processes_at_stage_2_are_those_of_stock():
    run_code(STEPS, 2)
