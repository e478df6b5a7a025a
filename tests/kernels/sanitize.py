"""compute-sanitizer over small cases of every kernel: ``python -m tests.kernels.sanitize`` on a machine with a GPU.

memcheck must find no error and racecheck no hazard, but for one that Triton's `warp_specialize` has by itself: warps
read one byte each of a table that tells them what to do. Barrier 1, of all warps, stands between each write of the
table and its reads. racecheck loses it as soon as warps also use a barrier of fewer: it names the reads of `least`
too, which does nothing but that. They are told apart as the one place where a warp-specialised kernel loads single
bytes from shared memory. Both tools must find what is wrong on purpose.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.kernels.forest_decode.api import Config
from hf_fastdecode.kernels.forest_decode.hopper import group_barrier
from hf_fastdecode.kernels.pointwise.api import Activation, GatedNormForm, NormForm, RotaryForm
from hf_fastdecode.kernels.sampling.api import sample
from hf_fastdecode.kernels.slim_decode.api import TwoLaunchConfig

from ..attention.forests import make_inputs
from ..attention.test_prefill_kernel import check_pass
from . import (
    test_experts,
    test_latent_queries,
    test_pointwise,
    test_row_products,
    test_slim_append,
    test_state_steps,
    test_stored_product,
)
from .operator_runs import check
from .sampling.cases import ids_of, settings_for
from .slim_decode.problems import Case as SlimCase
from .slim_decode.problems import make_problem
from .state_scans import test_convolve, test_delta_rule, test_mamba

HALF = torch.float16


@gluon.jit
def _both(out, at: gl.constexpr):
    group_barrier()
    gl.store(out + at, at + 1)


@gluon.jit
def _least(out):
    gl.warp_specialize([(_both, (out, 0)), (_both, (out, 1)), (_both, (out, 2))], [4, 1], [240, 24])


def least() -> None:
    """Warp specialisation by itself: no shared memory, and one barrier of four warps."""
    out = torch.zeros(3, dtype=torch.int32, device="cuda")
    _least[(8,)](out, num_warps=4)
    assert out.tolist() == [1, 2, 3]


@gluon.jit
def _exchange(out, shared, AT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # of one number, by stmatrix, which racecheck misses
    shared.index(AT).store(gl.full([512], 1, gl.int32, layout))
    at = gl.arange(0, 512, layout=layout)
    gl.store(out + AT * 512 + at, shared.index(1 - AT).load(layout))


@gluon.jit
def _race(out):
    shared = gl.allocate_shared_memory(gl.int32, [2, 512], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.warp_specialize([(_exchange, (out, shared, 0)), (_exchange, (out, shared, 1))], [4], [24])


def race() -> None:
    """Two groups of warps that read what the other stores, and do not wait for it: what racecheck must find."""
    _race[(8,)](torch.zeros(1024, dtype=torch.int32, device="cuda"), num_warps=4)


@triton.jit
def _write_outside(out):
    tl.store(out + 256, 1)


def outside() -> None:
    """A write behind a tensor's end: what memcheck must find."""
    _write_outside[(1,)](torch.zeros(256, dtype=torch.int32, device="cuda"))


def attend(config: Config, *, kv_heads: int = 2, head_dim: int = 64, queries: int = 1) -> None:
    """Two levels of nodes, of several tiles and of less than one, and ragged suffixes."""
    forest = Forest(40, [Node(Span(0, 0, 300), 0, 40), Node(Span(0, 300, 37), 3, 30, 1)])
    lengths = [queries + 7 * row % 40 for row in range(40)]
    options = {"heads": 8, "kv_heads": kv_heads, "head_dim": head_dim, "queries": queries, "dtype": torch.bfloat16}
    with sdpa_kernel(SDPBackend.MATH):  # racecheck names cuDNN's kernels, for the same reason
        check(*make_inputs(forest, lengths, **options, device="cuda"), config=config)


def prefill(head_dim: int, softcap: float | None) -> None:
    """Runs that end within tiles, after contexts and alone, under a window."""
    runs = [(70, (0, 2)), (9, ()), (200, (2,))]
    scores = {"window": 90, "softcap": softcap, "with_sinks": True}
    with sdpa_kernel(SDPBackend.MATH):
        check_pass(runs, heads=(6, 2), head_dim=head_dim, dtype=torch.bfloat16, device="cuda", **scores)


def draw(**numbers: float) -> None:
    logits = torch.randn(4, 3000, device="cuda").bfloat16()
    tokens, _ = sample(logits, ids_of(4, "cuda"), settings_for(numbers, "cuda", seed=2))
    assert tokens.min() >= 0 and tokens.max() < 3000


def attend_slim(case: SlimCase, config: TwoLaunchConfig | None = None) -> None:
    """Ragged and padded rows; without a config on clusters, in a case that they take."""
    make_problem(case, "cuda").check_repeats(config, parts=1 if config is None else config.parts)


def between_products() -> None:
    test_pointwise.test_rms_norm((3, 5, 1000), NormForm.ROUNDED, HALF)
    test_pointwise.test_gated_rms_norm((2, 96), 24, GatedNormForm.AFTER, HALF)
    test_pointwise.test_gated((3, 5, 64), Activation.GELU_TANH, HALF)
    test_pointwise.test_rotate(2, 5, 1, (9, 1), 64, 16, False, RotaryForm.ROUNDED, HALF)
    test_pointwise.test_rotate_with_norms((5, 1), 256, 64, False, RotaryForm.ROUNDED, NormForm.ROUNDED, HALF)
    test_pointwise.test_gradients_of_rms_norm((37, 5, 3, 80), NormForm.ROUNDED, HALF)
    test_pointwise.test_gradients_of_gated((3, 5, 64), Activation.GELU_TANH, HALF)
    test_pointwise.test_gradients_of_rotate((9, 1), 64, 16, False, RotaryForm.ROUNDED, HALF)
    test_slim_append.test_append_token(3, 9, 80, 32, 72, True, HALF)
    test_latent_queries.test_absorb((70, 1, 32, 32, 32, 130), "DeepSeek-V2", HALF)


def step_states() -> None:
    """Sizes that blocks do not divide."""
    test_state_steps.test_convolve(3, 4, True, torch.float32)
    test_state_steps.test_delta_rule(2, 3, 3, 24, 40, torch.float32)
    test_state_steps.test_scan(2, 1, 3, 24, 40, torch.float32)


def scan_tokens() -> None:
    """Segments of a token, of none, and that end within chunks."""
    test_convolve.test_convolve(3, 4, True, True, torch.float32)
    test_delta_rule.check(test_delta_rule.Case((2, 0, 66, 1), 1, 2, 24, 40, resumed=True), HALF)
    test_mamba.check(test_mamba.Case((2, 0, 66, 1), 1, 2, 24, 40, resumed=True), HALF)


def multiply() -> None:
    """Columns and widths that end within tiles."""
    test_stored_product.test_widths_divided_among_programs(3, torch.float32)
    test_row_products.test_row_products(17, test_row_products.config(17, 3), 3, True, HALF)


def mix() -> None:
    """Both orders of weights, columns that end within tiles, experts of several items and of none."""
    for transposed in (False, True):
        layout = {"transposed": transposed, "interleaved": transposed, "biased": True}
        test_experts.test_experts(33, layout, "silu", HALF)
    test_experts.test_sums_and_their_norm(5, 2, test_experts.NormForm.WHOLE, HALF)
    test_experts.test_largest(5, 33, 8, HALF)
    test_experts.test_experts_of_all_rows(33, 3, "silu", HALF)
    test_experts.test_route(5, 33, 300, HALF)
    test_experts.test_route_by_scores_in_fp32(70, 24, 4, 2, HALF)


RAGGED = {"lengths": (150, 1, 0, 77), "starts": (5, 0, 0, 7), "rank": 16}
CASES = {
    "least": least,
    "between products": between_products,
    "steps of states": step_states,
    "states over many tokens": scan_tokens,
    "race": race,
    "outside": outside,
    "nodes and suffixes": lambda: attend(Config(16)),
    "many queries": lambda: attend(Config(64, stages=2), queries=3),
    "prefill": lambda: prefill(64, None),
    "prefill of wide heads, with a soft cap": lambda: prefill(256, 30.0),
    "suffixes beside nodes": lambda: attend(Config(64, overlap_suffix=True)),
    "suffixes of MHA": lambda: attend(Config(64, overlap=False), kv_heads=8),
    "Hopper": lambda: attend(Config(128, 128, stages=2, hopper=True)),
    "Hopper, suffixes beside nodes": lambda: attend(
        Config(128, 128, stages=2, hopper=True, overlap_suffix=True), head_dim=128
    ),
    "sampling, top-p": lambda: draw(top_p=0.9),
    "sampling, all": lambda: draw(top_k=40, top_p=0.9, min_p=0.01, typical_p=0.7),
    "slim, in two launches": lambda: attend_slim(SlimCase(**RAGGED), TwoLaunchConfig(own_heads=2)),
    "slim, 8 bits": lambda: attend_slim(SlimCase(**RAGGED, dtype=torch.int8), TwoLaunchConfig(own_heads=2)),
    "clusters of slim": lambda: attend_slim(SlimCase(**RAGGED, heads=8, head_dim=128, rotary=128, consecutive=True)),
    "stored products, products of few rows": multiply,
    "experts": mix,
    "Hopper, grouped experts": lambda: test_experts.test_grouped_experts(True, "silu", torch.bfloat16),
}


_SPECIALIZED = ("_least", "hopper_node_partials")


def dispatch_of(cache: Path, kernel: str) -> int | None:
    """Where the machine code of a warp-specialised kernel, compiled once, loads the byte that says what to do."""
    if kernel not in _SPECIALIZED:
        return None
    (cubin,) = cache.rglob(f"{kernel}.cubin")
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (load,) = re.findall(r"/\*([0-9a-f]{4,})\*/\s+LDS\.U8 ", code)
    return int(load, 16)


_HAZARD = re.compile(
    r"Potential (\w+) hazard.*\n"
    r".* at \w+\+0x\w+.*\n"  # the first access
    r".* at (\w+)\+0x(\w+)"  # the second: kernel and instruction
)


def run(sanitizer: str, tool: str, case: str) -> bool:
    """Whether the tool finds what there is, beside Triton's own dispatch. Prints a line."""
    command = [sanitizer, "--tool", tool, "--show-backtrace", "no", "--print-limit", "1000000"]
    command += ["--racecheck-report", "hazard"] if tool == "racecheck" else []
    command += [sys.executable, "-m", "tests.kernels.sanitize", case]
    with tempfile.TemporaryDirectory() as cache:
        # Every tensor in an allocation of its own: memcheck knows of these, and not of tensors.
        variables = {"TRITON_CACHE_DIR": cache, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
        output = ran.stdout + ran.stderr
        hazards = _HAZARD.findall(output)
        reads = {kernel: dispatch_of(Path(cache), kernel) for _, kernel, _ in hazards}
        dispatch = sum(order == "RAW" and int(at, 16) == reads[kernel] for order, kernel, at in hazards)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    wanted = (tool, case) in (("racecheck", "race"), ("memcheck", "outside"))
    if (ran.returncode and not wanted) or len(summary) != 1:  # memcheck ends what it finds at fault
        print(f"{tool}: {case}: did not run to its end\n{output[-4000:]}", flush=True)
        return False
    found = int(summary[0]) - dispatch
    print(f"{tool}: {case}: {found} found" + f", {dispatch} of Triton's dispatch" * (dispatch > 0), flush=True)
    if bool(found) != wanted:
        print(output[:4000], flush=True)
    return bool(found) == wanted


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("the kernels run on a CUDA device, and there is none")
    if sys.argv[1:]:
        if sys.argv[1] not in CASES:
            sys.exit(f"a case is one of {', '.join(CASES)}, got {sys.argv[1]!r}")
        CASES[sys.argv[1]]()
        torch.cuda.synchronize()
        return
    toolkit = "/usr/local/cuda/bin"
    sanitizer = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], toolkit]))
    if sanitizer is None:
        sys.exit(f"compute-sanitizer is neither on PATH nor in {toolkit}: install the CUDA toolkit")
    major, _ = torch.cuda.get_device_capability()
    cases = [case for case in CASES if major == 9 or not case.startswith(("least", "race", "Hopper", "clusters"))]
    with ThreadPoolExecutor(8) as threads:
        clean = threads.map(lambda job: run(sanitizer, *job), product(("memcheck", "racecheck"), cases))
        sys.exit(not all([*clean]))


if __name__ == "__main__":
    main()
