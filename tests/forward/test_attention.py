"""Attention of a tree's distinct tokens and its gradients beside a dense mask: in fp64, and by PyTorch's operators."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fastdecode.attention.kv import Scoring
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.forward import attention, operators
from hf_fastdecode.forward.attention import attend
from hf_fastdecode.forward.trie import Node, Tree
from hf_fastdecode.kernels.prefill import api

from ..attention.forests import DEVICES
from ..generation.fused.half_models import Counted

TREES = {
    "samples of a prompt": [(163, -1), (20, 0), (1, 0), (65, 0), (20, 0)],
    "samples shorter than the prompt's copies": [(300, -1), (3, 0), (1, 0), (2, 0)],
    "prompts": [(40, -1), (9, 0), (9, 0), (31, -1), (30, 3), (1, 3), (5, -1)],
    "chains": [(33, -1), (1, 0), (2, 1), (17, 2), (1, 2), (3, 1), (40, 5), (41, 5), (64, -1), (1, 8), (1, 9), (8, 10)],
    "rows that share nothing": [(17, -1), (1, -1), (64, -1)],
}
"""Length and parent of each node."""

KEPT = {
    "a kept prompt": ([(129, -1)], [(20, 0), (7, 0), (1, 0)]),
    "kept nodes below kept nodes, read in another order": (
        [(19, -1), (30, 0), (41, -1), (6, 2)],
        [(5, 3), (7, 0), (9, 5), (2, 5), (4, 1), (3, 0), (8, 2), (1, -1)],
    ),
}
"""Likewise of kept nodes, and of new ones."""

SCORINGS = {
    "plain": Scoring(0.3),
    "window": Scoring(0.3, window=11),
    "window of one token": Scoring(0.3, window=1),
    "wide window": Scoring(0.3, window=10_000),
    "soft cap": Scoring(0.3, softcap=2.0),
    "soft cap and window": Scoring(0.3, softcap=2.0, window=25),
    "sinks": Scoring(0.3, sinks=torch.tensor(0.0)),
    "sinks and window": Scoring(0.3, window=8, sinks=torch.tensor(0.0)),
}
"""Sinks are drawn for the heads."""


def tree_of(new: list[tuple[int, int]], kept: list[tuple[int, int]] | None = None) -> Tree:
    nodes: list[Node] = []
    for length, parent in [*(kept or []), *new]:
        nodes.append(Node(nodes[-1].start + nodes[-1].length if nodes else 0, length, parent))
    return Tree(tuple(nodes), kept=sum(length for length, _ in kept or []))


def all_trees() -> dict[str, Tree]:
    return {name: tree_of(new) for name, new in TREES.items()} | {
        name: tree_of(new, kept) for name, (kept, new) in KEPT.items()
    }


def random_tree(seed: int) -> Tree:
    """New nodes in depth-first order below kept ones, which have no order but parents first."""
    draw = random.Random(seed)
    lengths = [1, 1, 2, 5, draw.randint(1, 40)]
    kept = []
    for number in range(draw.choice([0, 0, 1, 4])):
        kept.append((draw.choice(lengths), draw.randint(-1, number - 1)))
    new: list[tuple[int, int]] = []

    def add(parent: int, depth: int) -> None:
        new.append((draw.choice(lengths), parent))
        number = len(kept) + len(new) - 1
        for _ in range(draw.choice([0, 1, 2, 4]) if depth else 0):
            add(number, depth - 1)

    for _ in range(draw.randint(1, 4)):
        add(draw.randint(-1, len(kept) - 1), draw.randint(0, 4))
    return tree_of(new, kept)


def visible(tree: Tree, window: int | None) -> Tensor:
    """Which keys each query sees, ``[tokens, kept + tokens]``, token by token."""
    paths: list[list[int]] = []
    rows = []
    for node in tree.nodes:
        path = [] if node.parent < 0 else list(paths[node.parent])
        for token in range(node.start, node.start + node.length):
            path.append(token)
            rows.append(path[-window:] if window else list(path))
        paths.append(path)
    mask = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for token, path in enumerate(rows):
        mask[token, path] = True
    return mask[tree.kept :]


class Inputs:
    """Queries, keys, values, sinks if the scores have them, and the gradient of the result, in fp64."""

    def __init__(
        self, tree: Tree, scoring: Scoring, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, value_dim: int = 0
    ):
        torch.manual_seed(sum(node.length * (number + 3) for number, node in enumerate(tree.nodes)))
        keys = tree.nodes[-1].start + tree.nodes[-1].length
        tokens = keys - tree.kept
        shapes = [(tokens, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, value_dim or head_dim)]
        shapes += [(heads,)] if scoring.sinks is not None else []
        self.tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        self.grad = torch.randn(tokens, heads, value_dim or head_dim, dtype=torch.float64)
        self.tree, self.scoring, self.sizes = tree, scoring, (heads, kv_heads, head_dim, value_dim)

    def rounded(self, dtype: torch.dtype) -> Inputs:
        self.tensors = [
            part.to(dtype if index < 3 else torch.float32).double() for index, part in enumerate(self.tensors)
        ]
        self.grad = self.grad.to(dtype).double()
        return self

    def run(
        self, function: Callable[..., Tensor], dtype: torch.dtype = torch.float64, device: str = "cpu"
    ) -> list[Tensor]:
        """Result and gradients, in fp64 on the CPU; sinks stay in fp32 at least."""
        leaves = [
            part.to(device, torch.promote_types(dtype, torch.float32) if index == 3 else dtype).requires_grad_()
            for index, part in enumerate(self.tensors)
        ]
        scoring = self.scoring if len(leaves) == 3 else replace(self.scoring, sinks=leaves[3])
        out = function(*leaves[:3], self.tree, scoring)
        assert out.dtype == dtype
        grads = torch.autograd.grad(out, leaves, self.grad.to(device, dtype))
        return [part.detach().double().cpu() for part in (out, *grads)]


def oracle(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scoring: Scoring) -> Tensor:
    """Attention by a dense mask, in the inputs' dtype."""
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~visible(tree, scoring.window).to(query.device), -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype)[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sinks], -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(key)], value)


def stock(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scoring: Scoring) -> Tensor:
    """PyTorch's own attention with a dense mask; it has neither soft caps nor sinks."""
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    seen = visible(tree, scoring.window).to(query.device)
    return F.scaled_dot_product_attention(query, key, value, seen, scale=scoring.scale)[0].transpose(0, 1)


def errors(inputs: Inputs, function: Callable[..., Tensor], dtype: torch.dtype, device: str) -> list[float]:
    """Relative errors of result and gradients."""
    inputs = inputs.rounded(dtype)
    computed, right = inputs.run(function, dtype, device), inputs.run(oracle)
    return [float((one - other).norm() / other.norm()) for one, other in zip(computed, right)]


def check(inputs: Inputs, dtype: torch.dtype, device: str) -> None:
    """Compare the errors of result and gradients with those of PyTorch's own attention."""
    ours = errors(inputs, attend, dtype, device)
    without = Inputs(inputs.tree, replace(inputs.scoring, softcap=None, sinks=None), *inputs.sizes)
    stocks = errors(without, stock, dtype, device)
    stocks.append(stocks[1])  # PyTorch has no sinks: their gradient is made as that of queries is
    for name, one, other in zip(("out", "query", "key", "value", "sinks"), ours, stocks):
        bound = 2.0 if dtype == torch.float32 else 1.1
        if dtype == torch.bfloat16 and device == "cuda" and name != "out":
            bound = 1.3  # flash attention rounds the gradients of each call's part
        # Few roundings may cancel by chance: then what one costs counts.
        rounding = torch.finfo(dtype).eps / 4
        assert one <= bound * max(other, rounding), f"{name}: {one:.2e}, PyTorch's {other:.2e}"


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["as chosen", "all copied", "none copied"])
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operators that can attend to copies of keys do so always, or never."""
    if request.param != "as chosen":
        number = torch.inf if request.param == "all copied" else 0.0
        monkeypatch.setattr(operators.Products, "copies", number)


@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 4, 80), (8, 1, 16)], ids=["gqa", "mha", "mqa"])
@pytest.mark.parametrize("name", [*TREES, *KEPT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_errors_are_those_of_stock(name: str, heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    check(Inputs(all_trees()[name], Scoring(heads[2] ** -0.5), *heads), dtype, device)


@pytest.mark.parametrize("scoring", [name for name in SCORINGS if "one token" not in name])  # its gradients are 0
@pytest.mark.parametrize("name", ["chains", list(KEPT)[1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_errors_with_score_options_are_those_of_stock(
    name: str, scoring: str, dtype: torch.dtype, device: str
) -> None:
    check(Inputs(all_trees()[name], SCORINGS[scoring], heads=16, kv_heads=4), dtype, device)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.usefixtures("copies")
def test_random_trees_are_those_of_dense_masks(
    seed: int, scoring: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "_MOST_QUERIES", 5)  # products in several blocks
    inputs = Inputs(random_tree(seed), SCORINGS[scoring])
    for ours, right in zip(inputs.run(attend, device=device), inputs.run(oracle)):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("window", [None, 1, 7, 33])
@pytest.mark.parametrize("seed", range(6))
def test_intervals_are_the_keys_that_tokens_see(seed: int, window: int | None) -> None:
    tree = random_tree(seed)
    seen = visible(tree, window)
    counted = torch.zeros(seen.shape, dtype=torch.long)
    for part in attention._Paths(tree).intervals(window, torch.device("cpu")):
        assert part.dtype == torch.int32 and len(part[0].unique()) == len(part[0])
        for query, *spans in part.T.tolist():
            for first, last in (spans[:2], spans[2:]):
                counted[query, first : max(first, last + 1)] += 1
    assert torch.equal(counted, seen.long())
    assert torch.equal(part[0], torch.arange(len(seen)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
@pytest.mark.parametrize("name", ["samples of a prompt", "chains", list(KEPT)[1]])
@pytest.mark.parametrize("scoring", ["soft cap", "sinks and window"])
def test_the_prefill_kernel_interpreted(name: str, scoring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of paths of one node and of many, in one launch for each two of them."""
    pytest.importorskip("triton")
    launches = []
    monkeypatch.setattr(attention, "kernel_serves", lambda *parts: operators.refusal(*parts) is None)
    monkeypatch.setattr(operators, "prefill_attention", counted := Counted(api.prefill_attention))
    monkeypatch.setattr(operators, "prefill_partial", lambda *a, **k: launches.append(api.prefill_partial(*a, **k)))
    inputs = Inputs(all_trees()[name], SCORINGS[scoring]).rounded(torch.float32)
    for ours, right in zip(inputs.run(attend, torch.float32), inputs.run(oracle), strict=True):
        assert (ours - right).norm() <= 1e-5 * right.norm()
    assert counted.count == 1
    assert not launches or name != "samples of a prompt"


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 11])
def test_flash_attention_where_the_kernel_fails(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(all_trees()["chains"], Scoring(0.3, window=window))
    by_kernel = inputs.run(attend, torch.bfloat16, "cuda")
    calls = []
    monkeypatch.setattr(attention, "attend_by_kernel", lambda *_: calls.append(1))
    by_flash, expected = inputs.run(attend, torch.bfloat16, "cuda"), inputs.rounded(torch.bfloat16).run(oracle)
    assert calls
    for one, other, right in zip(by_flash, by_kernel, expected):
        assert (one - right).norm() <= 2 * (other - right).norm()


def test_values_of_another_width(device: str) -> None:
    check(Inputs(all_trees()["chains"], Scoring(0.2), head_dim=24, value_dim=16), torch.float32, device)


def test_gradients_are_those_of_finite_differences() -> None:
    for scoring in (Scoring(0.5), Scoring(0.5, window=3), Scoring(0.5, softcap=1.5)):
        tree = tree_of([(2, -1), (1, 0), (2, 1), (2, 0)], [(2, -1)])
        inputs = Inputs(tree, replace(scoring, sinks=torch.tensor(0.0)), heads=2, kv_heads=1, head_dim=2)
        leaves = [part.requires_grad_() for part in inputs.tensors]
        assert torch.autograd.gradcheck(
            lambda *parts, tree=tree, scoring=scoring: attend(*parts[:3], tree, replace(scoring, sinks=parts[3])),
            leaves,
        )


def test_strides_do_not_matter(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = Inputs(all_trees()["prompts"], Scoring(0.3))

    def strided(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scoring: Scoring) -> Tensor:
        packed = torch.cat([key, query, query], 1)  # one projection
        by_head = value.transpose(0, 1).contiguous().transpose(0, 1)
        query = packed[:, key.shape[1] : -query.shape[1]]
        out = attend(query, packed[:, : key.shape[1]], by_head, tree, scoring)
        return out.transpose(0, 1).contiguous().transpose(0, 1)  # the gradient is by head

    for one, other in zip(inputs.run(attend, dtype, device), inputs.run(strided, dtype, device)):
        torch.testing.assert_close(one, other)
    inputs.grad = torch.ones(()).expand_as(inputs.grad)  # of a sum, without strides
    for one, other in zip(inputs.run(attend, device=device), inputs.run(oracle)):
        torch.testing.assert_close(one, other)


def test_only_inputs_and_results_are_saved(device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    inputs = Inputs(all_trees()["chains"], Scoring(0.3))
    leaves = [part.to(device, dtype).requires_grad_() for part in inputs.tensors]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda part: saved.append(part) or part, lambda part: part):
        with torch.no_grad():
            assert not attend(*leaves, inputs.tree, inputs.scoring).requires_grad
        assert not attend(*(part.detach() for part in leaves), inputs.tree, inputs.scoring).requires_grad
        assert not saved
        out = attend(*leaves, inputs.tree, inputs.scoring)
    assert [part.shape for part in saved] == [*(part.shape for part in (*leaves, out)), (4, len(out))]


@pytest.mark.gpu
def test_layers_after_the_first_do_not_wait_for_the_gpu() -> None:
    inputs = Inputs(all_trees()["chains"], Scoring(0.3))
    leaves = [part.to("cuda", torch.bfloat16).requires_grad_() for part in inputs.tensors]
    attend(*leaves, inputs.tree, inputs.scoring).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(*leaves, inputs.tree, inputs.scoring).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_layers_share_what_is_computed_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs(all_trees()["chains"], Scoring(0.3))
    first = inputs.run(attend)
    monkeypatch.setattr(attention, "_Paths", pytest.fail)
    monkeypatch.setattr(attention, "_call", pytest.fail)
    for one, other in zip(first, inputs.run(attend)):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("shape", "scoring", "expected"),
    [
        ((torch.float32, 16, 16), Scoring(1.0), "FusedOnCpu"),
        ((torch.bfloat16, 16, 16), Scoring(1.0), "FusedOnCpu"),
        ((torch.float32, 24, 16), Scoring(1.0), "Products"),
        ((torch.float32, 16, 16), Scoring(1.0, window=3), "Products"),
        ((torch.float32, 16, 16), Scoring(1.0, softcap=3), "Products"),
    ],
)
def test_operators(shape: tuple[torch.dtype, int, int], scoring: Scoring, expected: str) -> None:
    dtype, head_dim, value_dim = shape
    query, values = torch.empty(5, 4, head_dim, dtype=dtype), torch.empty(5, 2, value_dim, dtype=dtype)
    assert type(operators.choose_operator(query, values, scoring)).__name__ == expected


def test_biases_by_distance_are_refused() -> None:
    inputs = Inputs(all_trees()["prompts"], Scoring(0.3))
    with pytest.raises(Unsupported, match="biases by distance"):
        attend(*inputs.tensors, inputs.tree, Scoring(1.0, distances=torch.zeros(4, 3)))
