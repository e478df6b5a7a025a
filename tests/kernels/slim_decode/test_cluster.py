"""The slim decode kernel on thread block clusters: compiled here, run against the fp64 oracle on a GPU."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from hf_fastdecode.kernels import slim_decode
from hf_fastdecode.kernels.slim_decode import api
from hf_fastdecode.kernels.slim_decode.api import ClusterConfig, choose_config
from hf_fastdecode.kernels.slim_decode.cluster import ClusterShape
from hf_fastdecode.kernels.slim_decode.config import choose_cluster_config

from ...cases import exhaustive_but
from .emulator import emulate
from .problems import Case, make_problem

HALF, BRAIN = torch.float16, torch.bfloat16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
SOURCE = Path(slim_decode.__file__).with_name("cuda") / "cluster.cu"


def case(*lengths: int, heads: int = 32, head_dim: int = 128, rotary: int | None = None, **options) -> Case:
    rotary = head_dim if rotary is None else rotary
    return Case(lengths, heads=heads, head_dim=head_dim, rotary=rotary, consecutive=True, **options)


CASES = [
    case(4000, offset=False),
    case(300, 17, 1000, offset=False),
    case(4000, 1, 0, 2777, starts=(5, 0, 0, 700), rank=512),
    case(3000, 3000, rank=512, dtype=BRAIN, offset=False),
    case(3000, 700, heads=40, rank=640),
    case(300, 700, heads=32, head_dim=64, rank=64, tables_of_rows=True),
    case(300, 700, heads=16, head_dim=256, dtype=BRAIN),
    case(300, 700, heads=12, head_dim=64, rank=96, rotary=0),
    case(*(2000,) * 17, heads=8, head_dim=64, rank=16),
    case(*(1,) * 40, heads=4, head_dim=128, rank=8),
    case(0, 0, heads=4),
    case(4000, offset=False, dtype=INT8),
    case(4000, 1, 0, 2777, starts=(5, 0, 0, 700), rank=512, dtype=INT8),
    case(3000, 700, starts=(0, 31), rank=512, dtype=FP8, offset=False),
    case(3000, 700, heads=40, rank=640, dtype=INT8),
    case(300, 700, heads=32, head_dim=64, rank=512, tables_of_rows=True, dtype=INT8),
    case(300, 700, heads=16, head_dim=256, dtype=FP8),
    case(300, 1700, heads=16, head_dim=128, rank=240, rotary=0, dtype=INT8),
    case(*(1,) * 40, heads=8, head_dim=128, rank=16, dtype=INT8),
]


def chosen(problem, of: Case) -> ClusterConfig:
    rotary, offset = problem.options["rotary"], problem.options["key_offset"]
    config = choose_config(
        of.heads, of.head_dim, of.rank, of.dtype, problem.keys.device, rotary=rotary, offset=offset is not None
    )
    assert isinstance(config, ClusterConfig)
    return config


EMULATED = [
    case(150, 7, heads=4, head_dim=64, rank=16),
    case(150, 90, heads=4, rank=16, starts=(3, 0), dtype=BRAIN, tables_of_rows=True),
    case(300, heads=2, head_dim=256, offset=False, dtype=INT8),
    case(200, 0, 40, heads=4, rank=48, starts=(7, 0, 39), dtype=INT8),
    case(150, heads=8, head_dim=64, rank=512, rotary=0, dtype=FP8),
    case(40, 800, heads=2, offset=False, dtype=INT8, row_ratio=2**-8),
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles with g++")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there the kernel itself runs")
@pytest.mark.parametrize("of", exhaustive_but(EMULATED[:1], EMULATED), ids=str)
def test_averages_and_lse_on_an_emulator(of, monkeypatch, tmp_path):
    emulate(monkeypatch, tmp_path)
    problem = make_problem(of)
    problem.check(problem.run(chosen(problem, of)), parts=1)


@pytest.mark.gpu
@pytest.mark.parametrize("of", CASES, ids=str)
def test_averages_and_lse(of):
    """Ten repeats have equal bits."""
    problem = make_problem(of, "cuda")
    problem.check_repeats(chosen(problem, of), repeats=10, parts=1)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("of", "change"),
    [
        *((CASES[2], change) for change in ({"clusters": 1}, {"clusters": 3}, {"stages": 4}, {"lead": 2})),
        *((CASES[12], change) for change in ({"copies": 2}, {"stages": 3, "lead": 2, "copies": 3}, {"clusters": 2})),
    ],
    ids=str,
)
def test_every_launch_parameter(of, change):
    problem = make_problem(of, "cuda")
    problem.check(problem.run(replace(chosen(problem, of), **change)), parts=1)


@pytest.mark.gpu
@pytest.mark.parametrize("magnitude", [1e-30, 1e-20, 1e30])
def test_the_range_of_8_bits_is_that_of_fp32(magnitude):
    of = replace(CASES[12], offset=False)
    problem = make_problem(of, "cuda")
    problem.check_magnitude(chosen(problem, of), magnitude)


@pytest.mark.gpu
def test_a_captured_graph_follows_growing_lengths():
    problem = make_problem(CASES[2], "cuda")
    last = problem.lengths.clone()
    config = chosen(problem, CASES[2])
    problem.run(config)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = problem.run(config)
    for share in (0.0, 0.01, 0.3, 0.31, 1.0):
        problem.lengths.copy_(last * share)
        graph.replay()
        problem.check(found, parts=1)


@pytest.mark.gpu
def test_launches_on_several_streams():
    problems = [make_problem(CASES[0], "cuda", seed=seed) for seed in range(4)]
    expected = [problem.run() for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        for problem, stream in zip(problems, streams):
            with torch.cuda.stream(stream):
                found.append(problem.run())
    torch.cuda.synchronize()
    for index, result in enumerate(found):
        assert all(torch.equal(*pair) for pair in zip(result, expected[index % 4]))


COPIES = "2 copies to as many as stages in 8 bits, else None, got"
MEMBERS = "1, 2, 4 or 8 members, which divide the heads, got"


@pytest.mark.parametrize(
    ("of", "config", "message"),
    [
        ({"dtype": torch.float32}, {}, "take keys in fp16, bf16, int8 and .*, got torch.float32"),
        ({"dtype": INT8}, {}, f"{COPIES} None"),
        ({}, {"copies": 4}, f"{COPIES} 4"),
        ({"head_dim": 64, "dtype": INT8}, {"copies": 4}, "of 128 columns per member, got 64"),
        ({"head_dim": 96}, {}, "heads of 64, 128 or 256 elements, .* got 96, 96 and 0"),
        ({"rotary": 64}, {}, "of which RoPE rotates all or none, .* got 128, 64 and 0"),
        ({"heads": 12}, {}, f"{MEMBERS} 8 and 12"),
        ({"heads": 12}, {"members": 3}, f"{MEMBERS} 3 and 12"),
        ({}, {"tile": 16}, "tiles of 32 or 64 tokens, .* got 16"),
        ({}, {"stages": 3}, "4 to 6 stages and a lead of 2 to 4, got 3 and 4"),
        ({}, {"lead": 5}, "4 to 6 stages and a lead of 2 to 4, got 6 and 5"),
        ({"head_dim": 64}, {"tile": 32}, "of 64 for head_dim 64, got 32"),
        ({"heads": 32}, {"members": 1}, "120 accumulators per thread, got 512; raise members"),
        ({"heads": 32}, {"tile": 64}, "232448 bytes of shared memory per block, and need"),
    ],
    ids=str,
)
def test_what_clusters_do_not_take(of, config, message, monkeypatch):
    """Before anything is compiled, so that the kernel is not marked as failed; fp32 keys would be read as fp16."""
    monkeypatch.setattr(api, "shared_memory", lambda _: 227 * 1024)
    problem = make_problem(case(9, **{"heads": 8, **of}))
    with pytest.raises(ValueError, match=message):
        problem.run(ClusterConfig(**{"members": 8, **config}))


def test_tables_without_turns_are_refused():
    problem = make_problem(case(9, heads=8))
    problem.options["rotary"] = problem.options["rotary"]._replace(turns=None)
    with pytest.raises(ValueError, match="clusters need tables of RoPE with turns"):
        problem.run(ClusterConfig(8))


def test_launch_parameters_of_real_shapes():
    def config(*shape: int, rotary_dim: int, offset=False, dtype=HALF, **options) -> ClusterConfig | None:
        return choose_cluster_config(*shape, dtype, rotary_dim=rotary_dim, offset=offset, **options)

    assert config(32, 128, 0, rotary_dim=128) == ClusterConfig(8, tile=32, stages=6)
    assert config(32, 128, 512, rotary_dim=128) == ClusterConfig(8, tile=32, stages=5)
    assert config(40, 128, 0, rotary_dim=128, offset=True) == ClusterConfig(8, tile=32, stages=5, lead=2)
    assert config(40, 128, 640, rotary_dim=128) == ClusterConfig(8, tile=32, stages=4, lead=4)
    assert config(8, 64, 0, rotary_dim=0) == ClusterConfig(2, tile=64, stages=6)
    assert config(32, 128, 0, rotary_dim=128, dtype=INT8) == ClusterConfig(8, tile=32, stages=4, copies=4)
    assert config(32, 128, 512, rotary_dim=128, dtype=FP8) == ClusterConfig(8, tile=32, stages=4, lead=2, copies=3)
    assert config(40, 128, 640, rotary_dim=128, dtype=INT8) == ClusterConfig(8, tile=32, stages=3, lead=3, copies=2)
    assert config(32, 96, 0, rotary_dim=96) is None
    assert config(32, 128, 4, rotary_dim=128) is None
    assert config(32, 128, 0, rotary_dim=128, dtype=torch.float32) is None
    assert config(32, 128, 0, rotary_dim=64) is None
    assert config(128, 128, 0, rotary_dim=128) is None
    assert config(32, 128, 0, rotary_dim=128, shared_memory=48 * 1024) is None


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="compiles with nvcc")
@pytest.mark.parametrize("of", exhaustive_but([CASES[7]], [CASES[at] for at in (0, 2, 5, 7, 12, 13, 15)]), ids=str)
def test_it_compiles_and_its_shared_memory_is_as_the_host_counts(of, tmp_path):
    """The source asserts its own number of bytes."""
    config = choose_cluster_config(of.heads, of.head_dim, of.rank, of.dtype, rotary_dim=of.rotary, offset=of.offset)
    offset = of.offset and of.rotary > 0
    shape = ClusterShape(of.heads, of.head_dim, of.rank, of.rotary, offset, True, of.dtype, config)
    numbers = [f"-D{name}={value}" for name, value in shape.numbers().items()]
    target = ["-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-cubin", "-Xptxas", "-v"]
    command = ["nvcc", *target, "-o", str(tmp_path / "kernel.cubin"), *numbers, "-x", "cu", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (spilled,) = re.findall(r"(\d+) bytes spill stores", done.stderr)
    assert int(spilled) <= 512  # addresses, which are read again in each tile
