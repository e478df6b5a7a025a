"""FlashInfer's wrappers as ways: pages of 16 tokens, tables that CUDA graphs can replay, planned before the timing.

- `decode_calls`: `BatchDecodeWithPagedKVCacheWrapper` over each row's whole context. Rows name the pages of what they
  share, which are stored once and read once a row, as servers do without cascade attention.
- `cascade_calls`: `MultiLevelCascadeAttentionWrapper`: a level for each depth of nodes, one for the suffixes.

The pages of a sequence lie in order, one behind the other. New tokens are in their places, as for all baselines.
"""

from __future__ import annotations

import importlib
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..measurement.status import NotAvailableError
from .op_cases import OpCase
from .op_inputs import OpInputs
from .pages import LAYOUTS, PAGE_SIZE, PagePool, Sequences, levels, whole_rows

HEAD_DIMS = (64, 128, 256)

_WORKSPACE_BYTES = 512 << 20  # plans for CUDA graphs keep fp32 partial outputs: 285 MB for 1,024 rows of 32/32 heads

_Calls = list[Callable[[], Tensor]]

_Run = Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]
"""Attends queries ``[rows, heads, head_dim]`` to keys and values in pages."""


def flashinfer_refusal(case: OpCase) -> str | None:
    """Why FlashInfer has no kernels for a case, or None."""
    if case.dtype not in ("float16", "bfloat16"):
        return f"FlashInfer takes float16 and bfloat16, got {case.dtype}"
    if case.head_dim not in HEAD_DIMS:
        return f"FlashInfer takes head_dim {', '.join(map(str, HEAD_DIMS))}, got {case.head_dim}"
    return None


def decode_calls(sets: Sequence[OpInputs]) -> dict[str, _Calls]:
    """Batch decode with and without tensor cores."""
    pool = PagePool()
    rows = whole_rows(pool, sets[0].case)
    kernels = {"CUDA cores": False, "tensor cores": True}
    return _calls(
        sets, pool, {name: partial(_decode, rows, tensor_cores=tensor_cores) for name, tensor_cores in kernels.items()}
    )


def cascade_calls(sets: Sequence[OpInputs]) -> dict[str, _Calls]:
    """The cascade wrapper as it is, and its steps with the FA2 kernels."""
    pool = PagePool()
    tables = levels(pool, sets[0].case)
    return _calls(sets, pool, {"cascade": partial(_cascade, tables), "FA2 cascade": partial(_fa2_cascade, tables)})


@dataclass(frozen=True)
class _Setup:
    """What all wrappers of a case are made from."""

    flashinfer: Any
    inputs: OpInputs
    workspace: Tensor
    layout: str

    def buffer(self, table: Tensor) -> Tensor:
        """A copy on the device, for graphs to read."""
        return table.to(self.inputs.query.device, copy=True)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The last positional arguments of every `plan`."""
        return self.inputs.case.heads, self.inputs.case.kv_heads, self.inputs.case.head_dim, PAGE_SIZE

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of every `plan`."""
        dtype = self.inputs.query.dtype
        return {"q_data_type": dtype, "kv_data_type": dtype, "sm_scale": self.inputs.scale}


def _decode(rows: Sequences, setup: _Setup, *, tensor_cores: bool) -> _Run:
    wrapper = setup.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        setup.workspace,
        setup.layout,
        use_cuda_graph=True,
        use_tensor_cores=tensor_cores,
        paged_kv_indptr_buffer=setup.buffer(rows.page_start),
        paged_kv_indices_buffer=setup.buffer(rows.pages),
        paged_kv_last_page_len_buffer=setup.buffer(rows.last_length),
    )
    wrapper.plan(rows.page_start, rows.pages, rows.last_length, *setup.shape, **setup.options)
    run: _Run = wrapper.run
    return run


def _cascade(tables: Sequence[Sequences], setup: _Setup) -> _Run:
    wrapper = setup.flashinfer.MultiLevelCascadeAttentionWrapper(
        len(tables),
        setup.workspace,
        setup.layout,
        use_cuda_graph=True,
        qo_indptr_buf_arr=[setup.buffer(level.query_start) for level in tables],
        paged_kv_indptr_buf_arr=[setup.buffer(level.page_start) for level in tables],
        paged_kv_indices_buf_arr=[setup.buffer(level.pages) for level in tables],
        paged_kv_last_page_len_buf_arr=[setup.buffer(level.last_length) for level in tables],
    )
    wrapper.plan(
        [level.query_start for level in tables],
        [level.page_start for level in tables],
        [level.pages for level in tables],
        [level.last_length for level in tables],
        *setup.shape,
        **setup.options,
    )
    run: _Run = wrapper.run
    return run


def _fa2_cascade(tables: Sequence[Sequences], setup: _Setup) -> _Run:
    """The steps of the cascade wrapper's `run` with FA2.

    The wrapper has no argument for a backend, and takes FA3 on Hopper, which neither splits keys nor packs the query
    heads of a KV head. Outputs go to buffers, since those that `run` allocates are filled with zeros first.
    """
    wrappers = []
    for level in tables:
        wrapper = setup.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            setup.workspace,
            setup.layout,
            use_cuda_graph=True,
            qo_indptr_buf=setup.buffer(level.query_start),
            paged_kv_indptr_buf=setup.buffer(level.page_start),
            paged_kv_indices_buf=setup.buffer(level.pages),
            paged_kv_last_page_len_buf=setup.buffer(level.last_length),
            backend="fa2",
        )
        wrapper.plan(
            level.query_start, level.page_start, level.pages, level.last_length, *setup.shape, **setup.options
        )
        wrappers.append(wrapper)
    *nodes, suffixes = wrappers
    other = torch.empty_like(setup.inputs.query.squeeze(2))

    def run(query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        out, lse = suffixes.run(query, cache, out=torch.empty_like(query), return_lse=True)
        for level in nodes:
            _, other_lse = level.run(query, cache, out=other, return_lse=True)
            setup.flashinfer.merge_state_in_place(out, lse, other, other_lse)
        return out

    return run


def _calls(
    sets: Sequence[OpInputs], pool: PagePool, wrappers: Mapping[str, Callable[[_Setup], _Run]]
) -> dict[str, _Calls]:
    """The calls of every wrapper in both layouts, compiled; those that FlashInfer refuses are left out with a warning.

    Raises:
        NotAvailableError: It refuses all of them; the message has each one's error.
    """
    try:
        flashinfer = importlib.import_module("flashinfer")
    except ImportError as error:
        raise NotAvailableError(f"flashinfer cannot be imported: {error}") from error
    inputs = sets[0]
    workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.query.device)
    caches = {layout: [pool.fill(each, layout) for each in sets] for layout in LAYOUTS}
    found: dict[str, _Calls] = {}
    refused = []
    for (name, make), layout in product(wrappers.items(), LAYOUTS):
        variant = f"FlashInfer {flashinfer.__version__}, {name}, {layout}"
        try:
            run = make(_Setup(flashinfer, inputs, workspace, layout))
            calls = [_call(run, each.query, cache) for each, cache in zip(sets, caches[layout], strict=True)]
            if calls[0]().is_cuda:
                torch.cuda.synchronize()
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # of Python, of its C++ and of the compiler
            reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
            refused.append(f"{variant}: {reason}")
        else:
            found[variant] = calls
    if not found:
        raise NotAvailableError("; ".join(refused))
    for each in refused:
        warnings.warn(f"left out: {each}", stacklevel=2)
    return found


def _call(run: _Run, query: Tensor, cache: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    queries = query.squeeze(2)
    return lambda: run(queries, cache).unsqueeze(2)
