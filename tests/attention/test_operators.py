"""The dense operators: which one is chosen, that a forced one runs or says why not, and each by the definition."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.torch_operators import TORCH_BACKENDS
from hf_fastdecode.attention.torch_operators.decode_ops import describe, forest_attention
from hf_fastdecode.attention.torch_operators.operators import (
    BackendError,
    DenseAttention,
    choose_operator,
    plain_partial,
)

from .forests import DTYPE_NAMES, LOW_AND_FULL, assert_error_rule, last_queries_see, make_inputs


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors without data, so that the choice for a GPU can be seen on any machine."""
    with FakeTensorMode():
        yield


def qkv(
    device: str, dtype: torch.dtype, head_dim: int = 64, value_dim: int | None = None, queries: int = 4, keys: int = 64
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((queries, head_dim), (keys, head_dim), (keys, value_dim or head_dim))
    query, key, value = (torch.empty(1, 2, *size, device=device, dtype=dtype) for size in sizes)
    return query, key, value


@pytest.mark.parametrize(
    ("expected", "asked"),
    [
        pytest.param("cpu", {"device": "cpu", "dtype": torch.float32}, id="cpu-fp32"),
        pytest.param("cpu", {"device": "cpu", "dtype": torch.bfloat16}, id="cpu-bf16"),
        pytest.param("plain", {"device": "cpu", "dtype": torch.float32, "value_dim": 32}, id="cpu-value-dim"),
        pytest.param("flash", {"device": "cuda", "dtype": torch.bfloat16}, id="cuda-bf16"),
        pytest.param("flash", {"device": "cuda", "dtype": torch.float16, "head_dim": 256}, id="cuda-d256"),
        pytest.param("efficient", {"device": "cuda", "dtype": torch.float16, "head_dim": 264}, id="cuda-d264"),
        pytest.param("efficient", {"device": "cuda", "dtype": torch.float32}, id="cuda-fp32"),
        pytest.param("plain", {"device": "cuda", "dtype": torch.float32, "head_dim": 6}, id="cuda-unaligned"),
        pytest.param("plain", {"device": "cuda", "dtype": torch.float64}, id="cuda-fp64"),
        pytest.param(
            "cudnn", {"device": "cuda", "dtype": torch.bfloat16, "queries": 4096, "keys": 4096}, id="cuda-large"
        ),
        pytest.param(
            "flash",
            {"device": "cuda", "dtype": torch.bfloat16, "queries": 4096, "keys": 4096, "head_dim": 256},
            id="cuda-large-d256",
        ),
    ],
)
def test_auto_chooses_an_operator_that_can_run(expected: str, asked: dict[str, Any]) -> None:
    with fake_tensors():
        assert choose_operator("auto", *qkv(**asked)) == expected


@pytest.mark.parametrize(
    ("backend", "asked", "reason"),
    [
        pytest.param("flash", {"device": "cpu", "dtype": torch.bfloat16}, "device 'cpu'", id="flash-on-cpu"),
        pytest.param("cudnn", {"device": "cpu", "dtype": torch.bfloat16}, "device 'cpu'", id="cudnn-on-cpu"),
        pytest.param("efficient", {"device": "cpu", "dtype": torch.float32}, "device 'cpu'", id="efficient-on-cpu"),
        pytest.param("cpu", {"device": "cuda", "dtype": torch.float32}, "device 'cuda'", id="cpu-on-cuda"),
        pytest.param("cpu", {"device": "meta", "dtype": torch.float32}, "device 'meta'", id="cpu-on-meta"),
        pytest.param(
            "cpu",
            {"device": "cpu", "dtype": torch.float32, "value_dim": 32},
            "one head_dim.* 64 and 32",
            id="value-dim",
        ),
        pytest.param("flash", {"device": "cuda", "dtype": torch.float32}, r"got torch\.float32", id="flash-fp32"),
        pytest.param(
            "flash",
            {"device": "cuda", "dtype": torch.float16, "head_dim": 264},
            "up to 256.* got 264",
            id="flash-d264",
        ),
        pytest.param(
            "flash",
            {"device": "cuda", "dtype": torch.float16, "head_dim": 20},
            "multiples of 8, got 20",
            id="flash-d20",
        ),
        pytest.param(
            "cudnn",
            {"device": "cuda", "dtype": torch.float16, "head_dim": 136},
            "up to 128.* got 136",
            id="cudnn-d136",
        ),
        pytest.param("efficient", {"device": "cuda", "dtype": torch.float64}, r"float64", id="efficient-fp64"),
        pytest.param(
            "efficient", {"device": "cuda", "dtype": torch.float32, "head_dim": 6}, "aligned.* 6", id="efficient-d6"
        ),
    ],
)
def test_a_forced_backend_that_cannot_run_says_why(backend: str, asked: dict[str, Any], reason: str) -> None:
    with fake_tensors(), pytest.raises(BackendError, match=f"'{backend}' cannot run: .*{reason}.*use backend="):
        choose_operator(backend, *qkv(**asked))


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradients_of_any_are_left_to_plain(wanted: int) -> None:
    tensors = qkv("cpu", torch.float32)
    assert choose_operator("auto", *tensors) == "cpu"
    tensors[wanted].requires_grad_()
    assert choose_operator("auto", *tensors) == "plain"
    with pytest.raises(BackendError, match="a gradient is needed"):
        choose_operator("cpu", *tensors)
    with torch.no_grad():
        assert choose_operator("auto", *tensors) == "cpu"


def test_an_unknown_backend_is_told_the_known_ones() -> None:
    with pytest.raises(BackendError, match=rf"{', '.join(TORCH_BACKENDS)}, got 'fastest'"):
        choose_operator("fastest", *qkv("cpu", torch.float32))


@pytest.mark.parametrize("backend", ["flash", "fastest"])
@pytest.mark.parametrize(
    ("lengths", "queries", "softcap"),
    [
        pytest.param([5, 5], 1, None, id="even"),
        pytest.param([5, 5], 3, None, id="causal"),
        pytest.param([3, 3], 3, None, id="nothing-before-the-queries"),
        pytest.param([5, 4], 1, None, id="ragged"),
        pytest.param([5, 5], 1, 5.0, id="softcap"),
    ],
)
def test_forest_attention_never_takes_another_operator_than_the_forced_one(
    lengths: list[int], queries: int, softcap: float | None, backend: str
) -> None:
    query, kv = make_inputs(Forest(2), lengths, heads=2, kv_heads=1, head_dim=8, queries=queries)
    with pytest.raises(BackendError, match=backend):
        forest_attention(query, kv, softcap=softcap, backend=backend)


@pytest.mark.parametrize(
    ("lengths", "softcap", "backend", "expected"),
    [
        pytest.param([5, 5, 5], None, "auto", "cpu", id="auto"),
        pytest.param([5, 5, 5], None, "plain", "plain", id="plain"),
        pytest.param([5, 5, 5], 5.0, "auto", "plain", id="softcap"),
        pytest.param([5, 4, 5], None, "auto", "plain", id="ragged"),
    ],
)
def test_describe_names_the_operator_of_every_part(
    lengths: list[int], softcap: float | None, backend: str, expected: str
) -> None:
    nodes = [Node(Span(0, 0, 9), 0, 3), Node(Span(0, 9, 4), 0, 1, 1), Node(Span(0, 20, 7), 1, 2, 1)]
    query, kv = make_inputs(Forest(3, nodes), lengths, heads=2, kv_heads=1, head_dim=8)
    line = describe(query, kv, softcap=softcap, backend=backend)
    root, groups, suffixes = line.split(", ")[:3]
    of_nodes = "cpu" if lengths != [5, 5, 5] else expected
    assert re.search(rf"1 node.* 9 tokens at depth 0 by {of_nodes}\b", root)
    assert re.search(rf"2 node.* 11 tokens at depth 1 by {of_nodes}\b", groups)
    assert re.search(rf"3 suffixes by {expected}\b", suffixes)


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, *LOW_AND_FULL], ids=DTYPE_NAMES.get)
def test_no_keys_is_the_empty_partial(dtype: torch.dtype, backend: str, device: str) -> None:
    query, keys, values = qkv(device, dtype, keys=0)
    out, lse = DenseAttention(1.0, backend=backend).partial(query.fill_(1.0), keys, values)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(out, torch.zeros(1, 2, 4, 64, dtype=wide, device=device))
    assert torch.equal(lse, torch.full((1, 2, 4), -torch.inf, dtype=wide, device=device))


def test_a_query_that_sees_no_key_gets_the_empty_partial() -> None:
    query, keys, values = (torch.randn(2, 3, 8) for _ in range(3))
    visible = torch.tensor([[True, False, True], [False] * 3, [True] * 3])
    out, lse = plain_partial(query, keys, values, 1.0, visible=visible)
    assert torch.equal(out[:, 1], torch.zeros(2, 8)) and torch.equal(lse[:, 1], torch.full((2,), -torch.inf))
    assert out.isfinite().all() and lse[:, ::2].isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_dense_operators_agree_with_the_definition(causal: bool, backend: str, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, 3, 70, 24, generator=generator).to(device) for _ in range(3))
    out, lse = DenseAttention(0.4, backend=backend).partial(query, keys, values, causal=causal)
    scores = 0.4 * query.double() @ keys.double().mT
    if causal:
        scores = scores.masked_fill(~last_queries_see(70, 70, device), -torch.inf)
    expected, expected_lse = torch.softmax(scores, -1) @ values.double(), torch.logsumexp(scores, -1)
    yardstick = F.scaled_dot_product_attention(query, keys, values, is_causal=causal, scale=0.4)
    assert_error_rule(out, yardstick, expected, expected_lse)
    assert_error_rule(lse, torch.logsumexp(scores.float(), -1), expected_lse, expected_lse)
