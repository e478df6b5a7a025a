"""The slim decode kernels against the fp64 oracle: in two launches, interpreted on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_fastdecode.kernels import limits
from hf_fastdecode.kernels.slim_decode.inputs import refusal

pytest.importorskip("triton")
from hf_fastdecode.attention.kv import Partial, merge
from hf_fastdecode.kernels import failures
from hf_fastdecode.kernels.failures import Kernel, KernelFailedError
from hf_fastdecode.kernels.slim_decode import api
from hf_fastdecode.kernels.slim_decode.api import ClusterConfig, RotaryTables, TwoLaunchConfig, slim_decode
from hf_fastdecode.kernels.slim_decode.config import choose_two_launch_config
from hf_fastdecode.patches.layers.slim_values import SlimValues

from ...cases import exhaustive_but
from .problems import Case, Problem, make_problem

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn

CASES = [
    Case(),
    Case((1,), rank=8),
    Case((16, 63, 64, 65), rank=32, head_dim=128, heads=2, rotary=128),
    Case((150, 0, 77), (5, 0, 40), rank=8, dtype=BRAIN),
    Case((90, 40), (90, 3), rank=0, rotary=32, tables_of_rows=True),
    Case((100, 20, 3), (7, 0, 1), heads=3, head_dim=96, rotary=0, rank=8),
    Case((50, 50), heads=5, head_dim=80, rotary=40, rank=32, dtype=BRAIN, tables_of_rows=True),
    Case((70,), heads=2, head_dim=256, rotary=128, rank=8, offset=False),
    Case((60, 0, 0, 60), heads=8, head_dim=64, rank=0),
    Case((0, 0), heads=2, rank=8),
    Case((100, 7, 33), (0, 2, 31), rank=40, dtype=HALF, tables_of_rows=True),
]
if INTERPRETED:  # tensor cores would round fp32 to TF32
    CASES.append(replace(CASES[-1], dtype=FULL))


OF_8_BITS = [
    Case(),
    Case((1,) * 9, rank=9),
    Case((16, 63, 64, 65), rank=33, head_dim=128, heads=2, rotary=128),
    Case((150, 0, 77), (5, 0, 40), rank=8),
    Case((100, 20, 3), (7, 0, 1), heads=3, head_dim=96, rotary=0, rank=200),
    Case((50, 50), heads=5, head_dim=80, rotary=40, rank=81, tables_of_rows=True),
    Case((70,), heads=2, head_dim=256, rotary=128, rank=7, offset=False),
    Case((0, 0), heads=2, rank=8),
    Case((90, 33), rank=8, rotary=0, magnitudes=True),
]
IN_8_BITS = [replace(case, dtype=dtype) for case in OF_8_BITS for dtype in (INT8, FP8)]


def small(**changes) -> TwoLaunchConfig:
    """A configuration for tests: few heads per program, so that a group has several."""
    base = TwoLaunchConfig(2, block_t=32 if not INTERPRETED else 16, warps=4, stages=3, programs=8)
    return replace(base, **changes)


@pytest.mark.parametrize("case", [*CASES, *exhaustive_but(IN_8_BITS[::3], IN_8_BITS)], ids=str)
def test_averages_and_lse(case):
    """Over 8 bits, at most twice the errors of PyTorch's operators in fp32 over the elements that they dequantise."""
    repeats = 0 if INTERPRETED and case.starts is None else 1  # programs are interpreted in one order only
    make_problem(case, DEVICE).check_repeats(small(own_heads=1 if case.head_dim > 128 else 2), repeats=repeats)


@pytest.mark.parametrize("of", [Case(rank=8), Case(rank=70, dtype=INT8)], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        {"own_heads": 1},
        {"own_heads": 4, "block_t": 32},
        {"own_heads": 8, "programs": 3},
        {"own_heads": 2, "programs": 2},
        {"programs": 40},
        {"parts": 1},
    ],
    ids=str,
)
def test_every_launch_parameter(change, of):
    """More groups than tiles, one program per group, rows that a group shares with others, padding heads.

    One part rounds weights and dequantised elements to fp16, as the yardstick then does.
    """
    problem = make_problem(replace(of, lengths=(90, 1, 40, 0), starts=(3, 0, 10, 0)), DEVICE)
    problem.check(problem.run(small(**change)), parts=change.get("parts", 2))


def test_partials_merge():
    """Over slots in two halves, as with attention to shared nodes."""
    whole = make_problem(Case((140, 60), rank=8, rotary=0), DEVICE)
    parts = []
    for starts, lengths in (((0, 0), (100, 60)), ((100, 60), (140, 60))):
        part = Problem(
            whole.query, whole.keys, whole.coordinates, torch.tensor(lengths, dtype=torch.int32).to(DEVICE), {}
        )
        part.options = whole.options | {"starts": torch.tensor(starts, dtype=torch.int32, device=DEVICE)}
        found = part.run(small())
        parts.append(Partial(torch.cat([found.keys, found.coordinates], -1), found.lse))
    merged = merge(*parts)
    columns = whole.keys.shape[-1]
    whole.check(type(found)(merged.out[..., :columns], merged.out[..., columns:], merged.lse))


@pytest.mark.parametrize("parts", [1, 2])
def test_errors_after_the_matrix_to_values(parts):
    """A matrix of condition 1e4 magnifies errors of averages, but not of weights, which are errors of values too."""
    columns, tokens = 256, 400
    problem = make_problem(Case((tokens,), heads=4, head_dim=64), DEVICE, extra=0)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    left, right = (torch.linalg.qr(normal(columns, columns)).Q for _ in range(2))
    matrix = (left / torch.logspace(0, -4, columns, dtype=torch.float64)) @ right
    inputs = normal(tokens, columns)
    # V = K M, with values of size 1
    problem.keys = (inputs @ right @ matrix.inverse()).to(HALF).to(DEVICE)[None]
    values = SlimValues(columns, columns, columns, 0, FULL)
    values.from_keys.values.copy_(matrix)
    values = values.to(DEVICE)
    matrix = values.from_keys.values.double()

    def of_heads(averages: torch.Tensor) -> torch.Tensor:  # [1, heads, e] -> [1, heads, value_dim]
        return torch.stack([averages[:, head] @ matrix[:, 64 * head : 64 * head + 64] for head in range(4)], 1)

    oracle = of_heads(problem.answer(torch.float64).keys)
    weights = torch.softmax(scores_of(problem), -1)
    pytorch = values.averaged(weights[:, :, None].float(), problem.keys[:, None], problem.keys[:, None, :, :0])[
        :, :, 0
    ]
    per_token = (problem.keys.double() @ matrix)[0].unflatten(-1, (4, 64)).half()  # as a KV cache has them
    fused = torch.einsum("rht,thd->rhd", weights.half().double(), per_token.double())
    ours = of_heads(problem.run(small(parts=parts)).keys.double())
    error, slim, cached = (float((found.double() - oracle).norm()) for found in (ours, pytorch, fused))
    assert error <= 2 * (slim if parts == 2 else cached), (error, slim, cached)


def scores_of(problem: Problem) -> torch.Tensor:
    heads, _, head_dim = problem.query.shape[1:]
    keys = (problem.keys.double() + problem.options["key_offset"].double()).unflatten(-1, (heads, head_dim))
    cos, sin = (table.double()[:, :, None] for table in problem.options["rotary"][:2])
    low, high = keys.chunk(2, -1)
    keys = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    return (problem.query.double() @ keys.permute(0, 2, 3, 1))[:, :, 0] * problem.options["scale"]


REAL = [
    Case((4000,), heads=32, head_dim=128, rotary=128),
    Case((4000, 1, 0, 2777), (5, 0, 0, 700), heads=32, head_dim=128, rotary=128, rank=512),
    Case((3000, 3000), heads=32, head_dim=128, rotary=128, rank=16, dtype=BRAIN),
    Case((2000, 70), heads=40, head_dim=128, rotary=64, rank=640),
    Case((2000,) * 17, heads=12, head_dim=64, rotary=64, rank=96),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, INT8, FP8], ids=["16-bits", "int8", "fp8"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("case", REAL, ids=str)
def test_real_shapes_on_a_gpu(case, parts, dtype):
    of = replace(case, dtype=dtype or case.dtype)
    problem = make_problem(of, DEVICE)
    config = choose_two_launch_config(of.heads, of.head_dim, of.rank, of.dtype)
    problem.check(problem.run(replace(config, parts=parts)), parts=parts)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        {"parts": 1},
        {"block_t": 16},
        {"block_t": 64, "stages": 2},
        {"warps": 16},
        {"own_heads": 2},
        {"own_heads": 8, "block_t": 16, "warps": 16},
    ],
    ids=str,
)
def test_every_launch_parameter_at_a_real_shape_on_a_gpu(change):
    problem = make_problem(REAL[1], DEVICE)
    config = replace(choose_two_launch_config(32, 128, 512, HALF), **change)
    problem.check(problem.run(config), parts=config.parts)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are interpreted")
def test_two_launches_take_the_place_of_clusters_that_fail(monkeypatch):
    """As without NVRTC; clusters that are asked for raise."""
    case = Case((40, 3), heads=4, head_dim=64, consecutive=True)
    problem, device = make_problem(case, DEVICE), torch.device("cpu")
    clusters = ClusterConfig(1, tile=64, stages=5)

    def fail(*_):
        raise RuntimeError("no NVRTC")

    def choose(*_, **__):
        return clusters if failures.failure(Kernel.CLUSTER, device) is None else small()

    monkeypatch.setattr(failures, "_failures", {})
    monkeypatch.setattr(api, "_on_clusters", fail)
    monkeypatch.setattr(api, "choose_config", choose)
    problem.check(problem.run())
    assert "on clusters cannot run on cpu: RuntimeError: no NVRTC" in failures.failure(Kernel.CLUSTER, device)
    with pytest.raises(KernelFailedError, match="no NVRTC"):
        problem.run(clusters)


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
