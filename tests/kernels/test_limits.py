"""What the kernels refuse, and how they say so."""

from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_fastdecode as fd
from hf_fastdecode.kernels import limits
from hf_fastdecode.kernels.forest_decode.limits import refusal

from ..tiny_models import ragged_prompts, tiny_model

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode import api
from hf_fastdecode.kernels.forest_decode.api import Config, forest_decode
from hf_fastdecode.kernels.forest_decode.limits import check_tokens
from hf_fastdecode.kernels.forest_decode.schedule import Schedule, make_schedule


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 2, 1, 24), torch.bfloat16, "multiples of 16, got 24"),
        ((1, 2, 1, 512), torch.bfloat16, "up to 256 in multiples of 16, got 512"),
        ((1, 2, 17, 64), torch.bfloat16, "up to 16 queries at once, got 17"),
        ((1, 2, 1, 64), torch.float32, "takes float16 and bfloat16, got torch.float32"),
        ((1, 2, 1, 64), torch.bfloat16, "runs on CUDA devices, got 'cpu'"),
    ],
)
def test_refusals_name_value_and_bound(shape, dtype, reason, monkeypatch):
    if "CUDA" in reason or "float32" in reason:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = "cpu" if "CUDA" in reason else "cuda"
    monkeypatch.setattr(limits, "compute_capability", lambda _: (9, 0))
    with FakeTensorMode():  # tensors without data, which lie on a GPU on any machine
        keys = torch.empty(shape, dtype=dtype, device=device)
        assert reason in refusal(keys, keys, keys, [keys])


def test_mixed_dtypes_and_gradients_are_refused():
    half, full = torch.empty(1, 2, 1, 64, dtype=torch.half), torch.empty(1, 2, 1, 64)
    assert "one dtype and device" in refusal(half, half, half, [full])
    assert "no gradients" in refusal(half.requires_grad_(), half, half, [half])


def test_a_forced_kernel_raises_where_it_cannot_run(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    model = tiny_model("llama-gqa")
    with (
        fd.enabled(model, backend="triton"),
        pytest.raises(ValueError, match="backend='triton' cannot run: it runs on"),
    ):
        model.generate(**ragged_prompts(80), num_return_sequences=2, max_new_tokens=3, do_sample=True)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "query",
            lambda x: x.repeat(1, 1, 1, 2)[..., ::2],
            r"query must be \[2, 4, 1, 32\] float16, contiguous in the last",
        ),
        ("query", lambda x: x.float(), "new_keys must be .* float32, .* got .* float16"),
        ("new_keys", lambda x: x[:1], r"new_keys must be \[2, 2, 1, 32\] .* got \[1, 2, 1, 32\]"),
        (
            "new_keys",
            lambda x: x.expand(2, 2, 1, 32).repeat(1, 2, 1, 1)[:, :3],
            "multiple of the KV heads, got 4 and 3",
        ),
        ("new_values", lambda x: x[..., :16], "new_values must be .* got .*16"),
        ("nodes", lambda x: x.int(), r"nodes must be \[3, 5\] int64, .* got .* int32"),
        ("nodes", lambda x: x[:2], r"nodes must be \[3, 5\] int64, .* got \[2, 5\]"),
        ("nodes", lambda x: x[0], r"nodes must be \[3\] int64, .* got \[5\]"),
        ("nodes", lambda x: x.repeat(1, 2)[:, ::2], r"nodes must be .* with strides \(10, 2\)"),
        ("suffix", lambda x: x.int(), r"suffix must be \[4\] int64"),
        ("suffix", lambda x: x[:3], r"suffix must be \[4\] int64, .* got \[3\]"),
        ("schedule", lambda _: schedule_of(3), "the schedule must be for the query's 2 rows, got one for 3"),
        ("config", lambda _: Config(32), r"cut into the configuration's blocks of \(32, 64\), got \(16, 64\)"),
        ("config", lambda _: Config(16, block_n=32), r"the configuration's blocks of \(16, 32\), got \(16, 64\)"),
        ("slots", lambda x: x[:1], r"slots must be \[2\] int32"),
        ("slots", lambda x: x.long(), "slots must be .* got .* int64"),
        ("lengths", lambda x: x[:, None], r"lengths must be \[3, 2\] int32"),
        ("sinks", lambda _: torch.zeros(2), r"sinks must be \[4\] float32"),
        ("sinks", lambda _: torch.zeros(4).half(), "sinks must be .* got .* float16"),
        ("scale", lambda _: 0.0, "scale must be above 0, got 0.0"),
        ("scale", lambda _: float("nan"), "scale must be above 0, got nan"),
        ("soft_cap", lambda _: -5.0, "soft_cap must be above 0, or None for none, got -5.0"),
        ("window", lambda _: 0, "window must be at least 1, or None for none, got 0"),
    ],
)
def test_arguments_that_would_read_other_memory_are_refused(name, change, message, monkeypatch):
    given = {"query": torch.zeros(2, 4, 1, 32).half(), "scale": 1.0, "soft_cap": None, "window": None}
    given |= {f"new_{part}": torch.zeros(2, 2, 1, 32).half() for part in ("keys", "values")}
    given |= {"slots": torch.zeros(2, dtype=torch.int32), "lengths": torch.zeros(2, dtype=torch.int32), "sinks": None}
    given |= {"nodes": torch.zeros(3, 5, dtype=torch.int64), "suffix": torch.zeros(4, dtype=torch.int64)}
    given |= {"schedule": schedule_of(2), "config": Config(16)}
    monkeypatch.setattr(api, "attend_nodes", Mock(side_effect=RuntimeError("launched")))
    with pytest.raises(RuntimeError, match="launched"):
        forest_decode(**given)
    with pytest.raises(ValueError, match=message):
        forest_decode(**given | {name: change(given[name])})


def test_other_types_are_refused():
    tokens = torch.zeros(2, 2, 1, 32, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"query must be fp16, bf16 or fp32, got torch\.float64"):
        check_tokens(tokens, tokens, tokens)


def schedule_of(rows: int) -> Schedule:
    blocks = {"block_m": 16, "block_n": 64}
    return make_schedule([], rows, kv_heads=2, queries=2, **blocks, programs=4, device="cpu")
