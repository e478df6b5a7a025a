"""What `slim_decode` refuses, and the launch parameters that it chooses."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_fastdecode.kernels.forest_decode import limits
from hf_fastdecode.kernels.slim_decode.inputs import refusal

pytest.importorskip("triton")
from hf_fastdecode.kernels.slim_decode.api import ClusterConfig, RotaryTables, TwoLaunchConfig, slim_decode
from hf_fastdecode.kernels.slim_decode.config import choose_two_launch_config, config_text, parse_config

INT = torch.int32


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 2, 2, 64), torch.float16, "takes 1 query at once, got 2"),
        ((1, 2, 1, 512), torch.float16, "even head_dim up to 256, got 512"),
        ((1, 2, 1, 33), torch.float16, "even head_dim up to 256, got 33"),
        ((1, 129, 1, 64), torch.float16, "up to 128 heads, got 129"),
        ((2000, 2, 1, 64), torch.float16, "up to 1024 rows, got 2000"),
        ((1, 2, 1, 64), torch.float32, "takes float16, bfloat16, int8 and float8_e4m3fn, got torch.float32"),
        ((1, 2, 1, 64), torch.float16, "runs on CUDA devices, got 'cpu'"),
    ],
)
def test_refusals_name_value_and_bound(shape, dtype, reason, monkeypatch):
    if "CUDA" in reason or "float32" in reason:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(limits, "compute_capability", lambda _: (9, 0))
    with FakeTensorMode():
        options = {"dtype": dtype, "device": "cpu" if "CUDA" in reason else "cuda"}
        keys, coordinates = (torch.empty(shape[0], 9, width, **options) for width in (shape[1] * shape[3], 0))
        assert reason in refusal(torch.empty(shape, **options), keys, coordinates)


def test_nothing_is_refused_where_it_runs():
    keys = torch.zeros(2, 9, 256, dtype=torch.half, device="cuda" if torch.cuda.is_available() else "cpu")
    assert refusal(torch.zeros(2, 4, 1, 64), keys, keys[..., :0]) is None
    assert "no gradients" in refusal(torch.zeros(2, 4, 1, 64).requires_grad_(), keys, keys[..., :0])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda x: x[:, :, 0], "query must be .rows, heads, 1, head_dim.* got .2, 4, 16."),
        ("query", lambda x: x.bfloat16(), "query must be float32 or torch.float16, .* got torch.bfloat16"),
        ("query", lambda x: x.repeat(1, 1, 1, 2)[..., ::2], "contiguous in the last dimension"),
        ("keys", lambda x: x.double(), "keys must be fp16, bf16, fp32, int8 or float8_e4m3fn, got torch.float64"),
        ("keys", lambda x: x[..., :32], r"keys must be \[2, 9, 64\] torch.float16, got \[2, 9, 32\]"),
        ("keys", lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1], "multiples of 16 bytes, got strides"),
        ("coordinates", lambda x: x[:, :5], r"coordinates must be \[2, 9, r\] torch.float16, got \[2, 5, 8\]"),
        ("coordinates", lambda x: x.float(), "coordinates must be .* got .* torch.float32"),
        ("lengths", lambda x: x.long(), r"lengths must be \[2\] int32, contiguous .* got \[2\] int64"),
        ("starts", lambda _: torch.zeros(3, dtype=INT), r"starts must be \[2\]"),
        ("key_offset", lambda _: torch.zeros(64).half(), r"key_offset must be \[64\] float32"),
        ("rotary", lambda x: RotaryTables(x[0], x[1][:, :5]), r"sin must be \[1, 9, 8\]"),
        ("rotary", lambda x: RotaryTables(*(x[0].repeat(1, 1, 2),) * 2), "must have 1 to 8 columns, got 16"),
        ("rotary", lambda x: x._replace(turns=torch.zeros(4, 2, 8)), r"turns must be \[64, 2, 8\]"),
        ("scale", lambda _: -1.0, "scale must be above 0, got -1.0"),
        ("config", lambda _: TwoLaunchConfig(3), "own_heads must be a power of 2 from 1, got 3"),
        ("config", lambda _: TwoLaunchConfig(4, block_t=8), "block_t must be a power of 2 from 16, got 8"),
        ("config", lambda _: TwoLaunchConfig(4, parts=3), "parts must be 1 or 2, got 3"),
        ("config", lambda _: TwoLaunchConfig(1, programs=3), "a group needs 4 programs; raise own_heads"),
    ],
)
def test_arguments_are_checked(name, change, message):
    keys = torch.zeros(2, 9, 64).half()
    given = {"query": torch.zeros(2, 4, 1, 16), "keys": keys, "coordinates": torch.zeros(2, 9, 8).half()}
    given |= {"lengths": torch.zeros(2, dtype=INT), "scale": 1.0, "rotary": RotaryTables(*(torch.zeros(1, 9, 8),) * 2)}
    given |= {"config": TwoLaunchConfig(4)}
    with pytest.raises(ValueError, match=message):
        slim_decode(**given | {name: change(given.get(name))})


def test_clusters_need_aligned_coordinates():
    keys, lengths = torch.zeros(2, 9, 256).half(), torch.zeros(2, dtype=INT)
    coordinates = torch.zeros(2, 9, 12).half()[..., 4:]
    config = ClusterConfig(1, tile=64, stages=5)
    with pytest.raises(ValueError, match="slots of coordinates must begin at multiples of 16 bytes"):
        slim_decode(torch.zeros(2, 4, 1, 64), keys, coordinates, lengths, config, scale=1.0)


def test_launch_parameters_of_real_shapes():
    half = torch.float16
    config = choose_two_launch_config(32, 128, 512, half)
    assert config == TwoLaunchConfig(4, block_t=32, warps=8, stages=4, parts=2)
    assert choose_two_launch_config(32, 128, 0, half, shared_memory=99 * 1024).stages == 2
    assert choose_two_launch_config(40, 128, 0, half).own_heads == 2
    assert choose_two_launch_config(8, 64, 0, half).own_heads == 8


def test_configurations_are_parsed():
    config = parse_config("own_heads=8,apart=0,block_t=64", TwoLaunchConfig(4))
    assert config == TwoLaunchConfig(8, block_t=64, apart=False)
    assert parse_config(config_text(config), TwoLaunchConfig(1)) == config
    assert parse_config("", config) == config
    for text in ("tiles=3", "apart", "parts=x"):
        with pytest.raises(ValueError, match="with names own_heads, block_t"):
            parse_config(text, config)
