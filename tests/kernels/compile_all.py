"""Every kernel and launch configuration compiled, without a GPU: ``python -m tests.kernels.compile_all [FOLDER ...]``.

Each FOLDER holds a version of Triton; the installed one follows. For each GPU below, a process pretends to run on it:
the package chooses its launch parameters and launches its kernels over tensors without memory, and what would be
launched is compiled down to machine code instead. Taking more shared memory than a program can have is a failure. Of
the launches found, as few are compiled as show every value of an option, every pair of tile sizes and the largest
tiles. Triton keeps what it has compiled: a second run takes seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import combinations, cycle, product
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported

import torch
import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import Scoring
from hf_fastdecode.attention.launch.kernel_call import run_kernels
from hf_fastdecode.attention.launch.plan import HeadShape, LaunchPlan
from hf_fastdecode.conversion.fit.cached_numbers import stored_bytes
from hf_fastdecode.kernels.experts.api import experts, largest
from hf_fastdecode.kernels.experts.config import MOST_OF_AN_EXPERT, MOST_PAIRS
from hf_fastdecode.kernels.experts.forms import Gate, Weights
from hf_fastdecode.kernels.forest_decode.api import Config, forest_decode, forest_partial
from hf_fastdecode.kernels.forest_decode.ranks import merge_ranks
from hf_fastdecode.kernels.forest_decode.schedule import Schedule
from hf_fastdecode.kernels.pointwise.api import gated, rms_norm, rotate
from hf_fastdecode.kernels.pointwise.forms import Activation, NormForm, RotaryForm
from hf_fastdecode.kernels.prefill.api import prefill_attention, prefill_partial
from hf_fastdecode.kernels.row_products.api import gated_product, row_products
from hf_fastdecode.kernels.row_products.config import MOST_PORTABLE_ROWS
from hf_fastdecode.kernels.sampling.api import Settings, sample
from hf_fastdecode.kernels.slim_append.api import append_token
from hf_fastdecode.kernels.slim_decode.api import RotaryTables, Scales, slim_decode
from hf_fastdecode.kernels.slim_decode.config import choose_two_launch_config
from hf_fastdecode.kernels.slim_decode.inputs import FP8_CAPABILITY
from hf_fastdecode.kernels.stored_product.api import MOST_ROWS, Term, stored_product


class Gpu(NamedTuple):
    """A GPU as CUDA describes it: name, multiprocessors, KiB of shared memory that one program can take."""

    name: str
    multiprocessors: int
    shared_memory: int


GPUS = {
    (8, 0): Gpu("NVIDIA A100-SXM4-80GB", 108, 163),
    (8, 6): Gpu("NVIDIA A10", 72, 99),
    (8, 9): Gpu("NVIDIA L4", 58, 99),
    (9, 0): Gpu("NVIDIA H100 80GB HBM3", 132, 227),
    (10, 0): Gpu("NVIDIA B200", 148, 227),
    (12, 0): Gpu("NVIDIA GeForce RTX 5090", 170, 99),
}
CUDA = torch.device("cuda", 0)


class Claimed(Tensor):
    """A tensor without memory that claims to be on a GPU."""

    device = CUDA
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


class Claiming(TorchFunctionMode):
    """Within, tensors that are made on a GPU, or moved there, only claim to be. (FakeTensorMode takes much longer.)"""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.to and args[1:] == (CUDA,):
            return args[0].to("meta").as_subclass(Claimed)
        if (kwargs or {}).get("device") == CUDA:
            return function(*args, **kwargs | {"device": "meta"}).as_subclass(Claimed)
        if function in (Tensor.sum, torch.empty_like):  # PyTorch's own for meta tensors, which look at the device
            return function(args[0].as_subclass(Tensor), *args[1:]).as_subclass(Claimed)
        return function(*args, **(kwargs or {}))


@contextmanager
def pretending(capability: tuple[int, int]) -> Iterator[None]:
    """Within, torch and Triton see one GPU, whose tensors have no memory."""
    name, multiprocessors, kib = GPUS[capability]
    properties = SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=multiprocessors,
        shared_memory_per_block_optin=1024 * kib,
        shared_memory_per_block=48 << 10,
        L2_cache_size=40 << 20,
        memory_clock_rate=1_500_000,
        memory_bus_width=4096,
    )
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda _: 0
    )
    triton.runtime.driver.set_active(driver)
    with ExitStack() as stack:
        stack.enter_context(patch("torch.cuda.get_device_properties", lambda _: properties))
        stack.enter_context(patch("torch.cuda.get_device_capability", lambda _: capability))
        stack.enter_context(patch("torch.cuda.current_device", lambda: CUDA.index))
        stack.enter_context(Claiming())
        yield


class Launch(NamedTuple):
    """One launch of a kernel; tensors are their dtypes."""

    kernel: JITFunction
    arguments: tuple[Any, ...]
    grid: tuple[int, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kernel.__name__}({self.dtype}, {self.options})"

    @property
    def dtype(self) -> torch.dtype:
        """Of the first tensor: queries or logits."""
        return next(argument for argument in self.arguments if isinstance(argument, torch.dtype))

    @property
    def everything(self) -> dict[str, Any]:
        """All options, the dtype and the fields of the sampling kernel's form among them."""
        form = self.options.get("FORM")
        return {**self.options, "FORM": None, "dtype": self.dtype, **(form._asdict() if form is not None else {})}

    @property
    def tile(self) -> list[int]:
        """What decides how much shared memory a program takes."""
        names = ("BLOCK_D", "BLOCK_N", "STAGES", "columns", "HALF", "OWN", "BLOCK_H", "BLOCK_R", "BLOCK_T")
        names += ("BLOCK_M", "BLOCK_C", "BLOCK_K")
        return [self.everything.get(name, 1) for name in names]

    def facets(self) -> Iterator[tuple[Any, ...]]:
        """What is compiled at least once: every value of an option, and every pair of sizes of a tile."""
        yield from ((self.kernel.__name__, *option) for option in self.everything.items() if option[0] != "vocab")
        yield from ((self.kernel.__name__, *pair) for pair in combinations(enumerate(self.tile), 2))


def launches() -> list[Launch]:
    """What the package launches on the GPU that is pretended, as far as it must be compiled."""
    found: list[Launch] = []

    def record(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        tensors = tuple(part.dtype if isinstance(part, Tensor) else part for part in arguments)
        found.append(Launch(kernel, tensors, grid, options))

    with patch.object(JITFunction, "run", record):
        attend_everything()
        prefill_everything()
        draw_everything()
        attend_to_slim_caches()
        append_to_slim_caches()
        multiply_by_stored_matrices()
        compute_between_products()
        multiply_few_rows()
        run_experts()
    unique = {str(launch): launch for launch in sorted(found, key=lambda launch: -prod(launch.tile))}
    facets = {name: set(launch.facets()) for name, launch in unique.items()}
    missing = set().union(*facets.values())
    largest = {(launch.kernel.__name__, launch.tile[0]): name for name, launch in reversed(unique.items())}
    kept = list(largest.values())
    missing.difference_update(*(facets[name] for name in kept))
    while missing:
        kept.append(max(facets, key=lambda name: len(facets[name] & missing)))
        missing -= facets[kept[-1]]
    return [unique[name] for name in kept]


def attend_everything() -> None:
    """Decode steps of many layouts over contexts of many lengths, in turn with everything that scores can undergo."""
    dtypes = cycle((torch.bfloat16, torch.float16))
    scorings = cycle(
        Scoring(0.1, softcap=softcap, window=window, sinks=sinks)
        for softcap, window, sinks in product((None, 30.0), (None, 500), (None, torch.zeros(1)))
    )
    layouts = product(
        (64, 80, 96, 128, 192, 256),  # head_dim
        ((1, 8), (1, 32), (3, 3), (4, 8), (8, 1), (16, 2)),  # query heads of a KV head, KV heads
        (1, 7, 33, 128, 1024),  # rows
        (300, 20_000),  # tokens of the node that all rows share
        (1, 3),  # tokens of a row
    )
    for (head_dim, (group, kv_heads), rows, context, queries), dtype, scoring in zip(layouts, dtypes, scorings):
        forest = Forest(rows, [Node(Span(0, 0, context), 0, rows)] if context else [])
        attend(dtype, head_dim, group, kv_heads, forest, queries, scoring)
    for dtype, softcap, (group, kv_heads), head_dim in product(
        (torch.bfloat16, torch.float16), (None, 30.0), ((1, 32), (4, 8), (16, 1)), (64, 80, 128)
    ):
        attend(dtype, head_dim, group, kv_heads, deep_tree(), 1, Scoring(0.1, softcap, None, None))


def deep_tree() -> Forest:
    """Eight levels of short nodes, which are read in chains."""
    levels = [(depth, 1 << depth) for depth in range(8)]
    nodes = [
        Node(Span(depth, 16 * index, 16), index * 1024 // count, 1024 // count, depth)
        for depth, count in levels
        for index in range(count)
    ]
    return Forest(1024, nodes)


def attend(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    kv_heads: int,
    forest: Forest,
    queries: int,
    scoring: Scoring,
) -> None:
    """One decode step of a layer, with suffixes that are short and long, in order and reordered."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=CUDA)

    rows = forest.rows
    query = empty(rows, group * kv_heads, queries, head_dim)
    new = empty(rows, kv_heads, queries, head_dim), empty(rows, kv_heads, queries, head_dim)
    if scoring.sinks is not None:
        scoring = Scoring(scoring.scale, scoring.softcap, scoring.window, empty(group * kv_heads, dtype=torch.float32))
    addresses = empty(3, len(forest.nodes), dtype=torch.int64), empty(4, dtype=torch.int64)
    rows_of = empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int32)
    plan = LaunchPlan(forest, HeadShape.of(query, new[0], scoring), CUDA)
    for programs in {plan.programs(0), plan.programs(2000)}:
        schedule = plan.schedule(programs)
        for origins in (None, empty(rows, 4096, dtype=torch.int32)):
            run_kernels(query, *new, *addresses, *rows_of, schedule, plan.config, scoring, origins)
        attend_in_parts(query, new, addresses, rows_of, schedule, plan.config, scoring)


def attend_in_parts(
    query: Tensor,
    new: tuple[Tensor, Tensor],
    addresses: tuple[Tensor, Tensor],
    rows_of: tuple[Tensor, Tensor],
    schedule: Schedule,
    config: Config,
    scoring: Scoring,
) -> None:
    """The nodes alone, a step that goes on with their partial and returns its own, and one of divided suffixes."""
    nodes, kv_heads = addresses[0], new[0].shape[1]
    parts = {"scale": scoring.scale, "soft_cap": scoring.softcap}
    if scoring.window is not None:
        return
    forest_partial(query, nodes, rows_of[0], schedule, config, kv_heads=kv_heads, **parts)
    other = (
        torch.empty(query.shape, dtype=torch.float32, device=CUDA),
        torch.empty(query.shape[:-1], dtype=torch.float32, device=CUDA),
    )
    merge_ranks(torch.empty(2, query.numel() + query[..., 0].numel(), dtype=torch.float32, device=CUDA), *other)
    parts |= {"sinks": scoring.sinks, "other": other, "return_lse": True}
    forest_decode(query, *new, *addresses, *rows_of, schedule, config, **parts)
    divided = torch.empty(3, query.shape[0], dtype=torch.int32, device=CUDA)
    parts |= {"other": None, "into": other}
    forest_decode(query, *new, *addresses, rows_of[0], divided, schedule, config, **parts)


def prefill_everything() -> None:
    """Passes of layers with soft caps, windows and sinks: alone, and over a context, whose partial is merged."""
    layouts = product((64, 80, 96, 128, 192, 256), ((1, 8), (2, 8), (8, 8)), (torch.bfloat16, torch.float16))
    for (head_dim, (group, kv_heads), dtype), (softcap, sinks) in product(
        layouts, product((None, 30.0), (False, True))
    ):
        query = torch.empty(group * kv_heads, 1000, head_dim, dtype=dtype, device=CUDA)
        keys = torch.empty(kv_heads, 1000, head_dim, dtype=dtype, device=CUDA)
        intervals = torch.empty(3, 1000, dtype=torch.int32, device=CUDA)
        earlier = tuple(
            torch.empty(shape, dtype=torch.float32, device=CUDA) for shape in (query.shape, query.shape[:2])
        )
        own = torch.empty(len(query), dtype=torch.float32, device=CUDA) if sinks else None
        options = {"scale": 0.1, "soft_cap": softcap}
        prefill_partial(query, keys, keys, intervals, earlier=earlier, **options)
        for before in (None, earlier):
            prefill_attention(query, keys, keys, intervals, sinks=own, earlier=before, **options)


def draw_everything() -> None:
    """A token from vocabularies of all sizes, with every feature of the sampling kernel."""
    switches = product((1000, 32_000, 151_936), (torch.bfloat16, torch.float16, torch.float32), *[(False, True)] * 5)
    for vocabulary, dtype, greedy, top_k, typical, penalty, ends in switches:
        settings = Settings(
            "cpu", greedy=greedy, top_k=top_k, typical=typical, penalty=penalty, eos_token_ids=[1, 2] * ends
        )
        logits = torch.empty(3, vocabulary, dtype=dtype, device=CUDA)
        seen = torch.empty(3, (vocabulary + 31) // 32, dtype=torch.int32, device=CUDA)
        sample(logits, torch.empty(3, dtype=torch.int32, device=CUDA), settings, seen=seen)


def attend_to_slim_caches() -> None:
    """A slim layer's step at many shapes, in two launches."""
    layouts = product(
        ((4, 64), (32, 64), (3, 80), (12, 128), (32, 128), (40, 128), (16, 256)),  # heads, head_dim
        (0, 16, 512),  # V-coordinates
        (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn),
    )
    features = cycle(product((0.0, 0.5, 1.0), (False, True), (1, 9)))
    takes_fp8 = torch.cuda.get_device_capability(CUDA) >= FP8_CAPABILITY
    memory = torch.cuda.get_device_properties(CUDA).shared_memory_per_block_optin
    for ((heads, head_dim), rank, dtype), (rotated, more, rows) in zip(layouts, features):
        if dtype == torch.float8_e4m3fn and not takes_fp8:
            continue
        columns, tables = heads * head_dim, int(rotated * head_dim) // 2

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=CUDA)

        table = empty(rows if more else 1, 4096, tables, dtype=torch.float32)
        numbers = empty(rows, dtype=torch.int32)
        query = empty(rows, heads, 1, head_dim, dtype=torch.float32)
        (keys, of_keys), (coordinates, of_coordinates) = (
            slim_part(rows, width, head_dim, dtype) for width in (columns, rank)
        )
        config = choose_two_launch_config(heads, head_dim, rank, dtype, shared_memory=memory)
        for changes in (
            {},
            {"parts": 1},
            {"apart": False},
        ):
            slim_decode(
                query,
                keys,
                coordinates,
                numbers,
                replace(config, **changes),
                scale=0.1,
                key_offset=empty(columns, dtype=torch.float32) if more else None,
                rotary=RotaryTables(table, table) if tables else None,
                starts=numbers if more else None,
                scales=Scales(of_keys, of_coordinates) if dtype.itemsize == 1 else None,
            )


def append_to_slim_caches() -> None:
    """One token of each row, whose query is rotated."""
    layouts = product(((32, 128, 128), (12, 80, 32)), (0, 512), (1, 5), (torch.float16, torch.bfloat16))
    for (heads, head_dim, rotary), rank, rows, dtype in layouts:
        columns = heads * head_dim
        fp32 = {width: torch.empty(rows, width, dtype=torch.float32, device=CUDA) for width in (columns, rank, rotary)}
        stored = [torch.empty(rows, 4096, width, dtype=dtype, device=CUDA) for width in (columns, rank)]
        slots = torch.empty(rows, dtype=torch.int64, device=CUDA)
        query = fp32[columns].view(rows, heads, head_dim)
        offset, tables = fp32[columns][0].as_subclass(Claimed), (fp32[rotary], fp32[rotary])
        append_token(query, fp32[columns], fp32[rank], offset, tables, slots, tuple(stored))


def multiply_by_stored_matrices() -> None:
    """Values of averages, and V-coordinates of inputs."""
    shapes = product((1, 5, 33, MOST_ROWS), ((1, 512), (32, 128), (3, 80)), (torch.float32, torch.bfloat16))
    for (rows, (groups, columns), dtype), second, in_range in product(shapes, (0, 48), (False, True)):
        terms = [
            Term(
                torch.empty(rows, groups, width, dtype=dtype, device=CUDA),
                torch.empty(width, groups * columns, dtype=torch.float16, device=CUDA),
                torch.empty(groups * columns, dtype=torch.float32, device=CUDA),
            )
            for width in (4096, second)
            if width
        ]
        for result in (torch.float32, torch.bfloat16):
            stored_product(terms, terms[0].scales if second else None, in_range=in_range, dtype=result)


def compute_between_products() -> None:
    """RMSNorm, rotary embedding and gated activations of models of many widths."""
    for dtype, columns in product((torch.bfloat16, torch.float16), (64, 80, 128, 1000, 4096, 16384)):
        x = torch.empty(3, columns, dtype=dtype, device=CUDA)
        for form in NormForm:
            rms_norm(x, x[0].as_subclass(Claimed), 1e-5, form)
        for activation in Activation:
            gated(x, x, activation)
    for dtype, (head_dim, rotary), heads in product(
        (torch.bfloat16, torch.float16), ((64, 64), (80, 32), (128, 128), (256, 256)), ((32, 8), (12, 1))
    ):
        queries, keys = (torch.empty(2, count, 5, head_dim, dtype=dtype, device=CUDA) for count in heads)
        cos = torch.empty(1, 5, rotary, dtype=dtype, device=CUDA)
        for form in RotaryForm:
            rotate(queries, keys, cos, cos, form)
        rotate(queries, keys, cos[..., : rotary // 2], cos[..., : rotary // 2], RotaryForm.ROUNDED, halves=True)


def multiply_few_rows() -> None:
    """Weights with and without biases, and gates, of all numbers of rows and of a width that 128 does not divide."""
    hopper = torch.cuda.get_device_capability(CUDA)[0] == 9
    counts = (1, 17, 33, 128) if hopper else (1, 17)
    for dtype, rows, width in product((torch.bfloat16, torch.float16), counts, (4096, 2880)):
        inputs, weight = (torch.empty(count, width, dtype=dtype, device=CUDA) for count in (rows, 4096))
        bias = torch.empty(4096, dtype=dtype, device=CUDA)
        for own in (None, bias):
            row_products(inputs, [weight] * 3, [own] * 3)
        if rows <= MOST_PORTABLE_ROWS:
            row_products(inputs, [weight] * 2, [None] * 2, dtype=torch.float32)
        for activation in Activation:
            gated_product(inputs, weight, weight, (None, None), activation)


def run_experts() -> None:
    """Experts of gpt-oss, Qwen3 and Mixtral, of all numbers of pairs."""
    models = (
        (32, 4, 2880, 2880, True),
        (128, 8, 2048, 768, False),
        (8, 2, 4096, 14336, False),
    )
    for dtype, (count, per_row, hidden, inner, transposed) in product((torch.bfloat16, torch.float16), models):
        shapes = [(count, 2 * inner, hidden), (count, hidden, inner)]
        if transposed:
            shapes = [(first, third, second) for first, second, third in shapes]
        parts = [torch.empty(shape, dtype=dtype, device=CUDA) for shape in shapes]
        biases = [torch.empty(count, width, dtype=dtype, device=CUDA) for width in (2 * inner, hidden)]
        most = min(MOST_PAIRS, MOST_OF_AN_EXPERT * count) // per_row
        for rows in (1, 8, most // 4, most // 2, most):
            x = torch.empty(rows, hidden, dtype=dtype, device=CUDA)
            chosen = torch.empty(rows, per_row, dtype=torch.int64, device=CUDA)
            shares = torch.empty(rows, per_row, dtype=dtype, device=CUDA)
            layouts = ((*biases, True, True), (*biases, True, False)) if transposed else ((None, None, False, False),)
            for layout, activation in product(layouts, Activation):
                experts(x, Weights(*parts, *layout), chosen, shares, Gate(activation))
        largest(torch.empty(3, count, dtype=dtype, device=CUDA), per_row)


def slim_part(rows: int, width: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers of a slim cache, and the scales behind those of 8 bits."""
    size = stored_bytes(width, dtype, head_dim) // dtype.itemsize
    stored = torch.empty(rows, 4096, size, dtype=dtype, device=CUDA)
    scales = stored[..., width:].view(torch.uint8)[..., : 2 * -(-width // head_dim)]  # behind which there may be room
    return stored[..., :width].as_subclass(Claimed), scales.as_subclass(Claimed)


def compile_for(capability: tuple[int, int]) -> int:
    """Compile everything for one GPU with the Triton at hand. Prints a line; returns how much failed."""
    most, failed = 0, 0
    with pretending(capability):
        found = launches()
        for launch in found:
            try:
                kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
            except Exception as error:
                failed += 1
                print(f"{launch}: {error}", flush=True)
                continue
            used = kernel.metadata.shared
            most = max(most, used)
            if used > 1024 * GPUS[capability].shared_memory:
                failed += 1
                print(f"{launch}: takes {used} bytes of shared memory", flush=True)
    gpu = f"Triton {triton.__version__}, sm_{capability[0]}{capability[1]}"
    room = f"up to {most / 1024:.0f} of {GPUS[capability].shared_memory} KiB of shared memory"
    print(f"{gpu}: {len(found) - failed} of {len(found)} kernels compiled, {room}", flush=True)
    return failed


def main() -> None:
    """Compile for every GPU by every Triton, each in a process of its own."""
    if sys.argv[1:2] == ["--gpu"]:
        major, minor = map(int, sys.argv[2].split("."))
        sys.exit(compile_for((major, minor)) > 0)

    def compiles(folder: str, capability: tuple[int, int]) -> bool:
        path = os.pathsep.join(part for part in (folder, os.environ.get("PYTHONPATH")) if part)
        command = [sys.executable, "-m", "tests.kernels.compile_all", "--gpu", ".".join(map(str, capability))]
        ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        print(ran.stdout if ran.stdout else ran.stderr[-4000:], end="", flush=True)
        return ran.returncode == 0

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        sys.exit(not all([*threads.map(compiles, *zip(*product((*sys.argv[1:], ""), GPUS)))]))


if __name__ == "__main__":
    main()
