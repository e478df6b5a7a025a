"""The rewritten graphs of compiled layers: which products become one operator, and the same numbers."""

from shutil import which

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Conv1D

from hf_fastdecode.generation.steps import compiled_layers
from hf_fastdecode.generation.steps.compiled_layers import CompiledLayers, with_concurrent_linears

from ..tiny_models import tiny_model

needs_gxx = pytest.mark.skipif(which("g++") is None, reason="inductor compiles for the CPU with g++")
OPERATOR = torch.ops.hf_fastdecode.linears.default


@pytest.fixture(autouse=True)
def _new_compilations():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture(params=["eager", "aot_eager"])
def compiled(request):
    """Run a function compiled with and without the rewrite; returns the sizes of groups and of what is left alone."""

    def run(function, *inputs):
        found = []

        def backend(module, arguments):
            for node in module.graph.nodes:
                if node.target is OPERATOR:
                    found.append(len(node.args[1]))
                elif node.target is F.linear:
                    found.append(1)
            return compile_graph(module, arguments)

        compile_graph = torch._dynamo.lookup_backend(request.param)
        expected = torch.compile(function, backend=request.param)(*(one.clone() for one in inputs))
        torch._dynamo.reset()
        outputs = torch.compile(function, backend=with_concurrent_linears(backend, 64))(*inputs)
        assert [one.shape for one in outputs] == [one.shape for one in expected]
        assert [one.stride() for one in outputs] == [one.stride() for one in expected]
        assert all(map(torch.equal, outputs, expected))
        return found

    return run


def weights(*sizes):
    return [torch.randn(size, 5) for size in sizes]


class Parallel(nn.Module):
    """GPT-J's layer: projections of attention and of the MLP read the same normalised input; some have biases."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.q, self.k, self.v = nn.Linear(5, 8), nn.Linear(5, 3, bias=False), nn.Linear(5, 1)
        self.up, self.down = nn.Linear(5, 20), nn.Linear(20, 5)

    def forward(self, x):
        y = self.norm(x)
        q, k = self.q(y), self.k(y)
        return q.relu(), k, self.v(y), x + self.down(F.gelu(self.up(y)))


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 1, 5), (65, 1, 5), (2, 7, 5)], ids=str)
def test_products_of_one_input(compiled, shape):
    assert compiled(Parallel(), torch.randn(shape)) == [4, 1]


def test_inputs_of_other_strides(compiled):
    assert compiled(Parallel(), torch.randn(5, 3, 2).transpose(0, 2)) == [4, 1]


class Keywords(nn.Linear):
    def forward(self, x):
        return F.linear(x, weight=self.weight, bias=self.bias)


def _chain(x, a, b):
    first = F.linear(x, a)
    return first, F.linear(first, b), F.linear(first + 1, a)


def _computed_weight(x, a, b):
    return F.linear(x, a), F.linear(x, b * 2), F.linear(x, a[:1])


def _other_inputs(x, a, b):
    return F.linear(x, a), F.linear(x + 1, b), F.linear(x * 1, b)


def _written_input(x, a, b):
    first = F.linear(x, a)
    x.add_(1)
    return first, F.linear(x, b)


def _written_view(x, a, b):
    y = x * 2
    first = F.linear(y, a)
    y.view(-1)[0] = 7
    return first, F.linear(y, b)


def _written_by_a_function(x, a, b):
    y = x * 2
    first = F.linear(y, a)
    F.relu(y, True)
    return first, F.linear(y, b)


def _written_weight(x, a, b):
    first = F.linear(x, a)
    b.mul_(2)
    return first, F.linear(x, b)


def _autocast(x, a, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, a), F.linear(x, b)


@pytest.mark.parametrize(
    "function",
    [
        *(_chain, _computed_weight, _other_inputs, _autocast),
        *(_written_input, _written_view, _written_by_a_function, _written_weight),
    ],
    ids=lambda function: function.__name__.strip("_"),
)
def test_products_that_stay(compiled, function):
    assert set(compiled(function, torch.randn(3, 5), *weights(5, 5))) == {1}


def test_some_stay_and_some_do_not(compiled):
    """Of one input, all but the product by a computed weight; single products of other inputs do not."""

    def function(x, a, b, c):
        y = F.linear(x, a * 2)
        return F.linear(x, b), y, F.linear(x, c), F.linear(y, a), F.linear(x + 1, b), F.linear(x, a)

    assert sorted(compiled(function, torch.randn(3, 5), *weights(5, 2, 9))) == [1, 1, 1, 3]


def test_other_modules_stay(compiled):
    """GPT-2's transposed weights, linear layers with keywords."""
    modules = nn.ModuleList([Conv1D(4, 5), Conv1D(2, 5), Keywords(5, 2), Keywords(5, 2)])
    assert compiled(lambda x: tuple(module(x) for module in modules), torch.randn(3, 5)) == [1, 1]


class Subclass(torch.Tensor):
    """Weights with products of their own, as quantized and distributed ones are."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data):
        self.data_of = data

    def __tensor_flatten__(self):
        return ["data_of"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Subclass(inner["data_of"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace == "hf_fastdecode":
            raise NotImplementedError("quantized weights know their own products only")
        plain = torch.utils._pytree.tree_map_only(Subclass, lambda one: one.data_of, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        return Subclass(result) if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default) else result


def test_weights_of_a_subclass_stay(compiled):
    module = nn.Module()
    module.plain, module.other = map(nn.Parameter, weights(4, 2))
    module.first, module.second = (nn.Parameter(Subclass(one)) for one in weights(4, 2))
    names = ("plain", "first", "other", "second")

    def function(x):
        return tuple(F.linear(x, getattr(module, name)) for name in names)

    assert sorted(compiled(function, torch.randn(3, 5))) == [1, 1, 2]


def test_graphs_with_gradients_stay(compiled):
    with torch.enable_grad():
        module, x = Parallel(), torch.randn(3, 5)
        assert compiled(module, x) == [1] * 5
        torch.compile(module, backend=with_concurrent_linears("aot_eager", 64))(x)[-1].sum().backward()
        assert module.up.weight.grad is not None


@pytest.mark.parametrize(("rows", "most_rows", "concurrent"), [(1, 1, True), (3, 3, True), (3, 2, False)])
def test_the_operator_counts_rows(monkeypatch, rows, most_rows, concurrent):
    asked = []

    def linears(inputs, weights, biases, *, concurrent, stock=compiled_layers.linears):
        asked.append(concurrent)
        return stock(inputs, weights, biases, concurrent=concurrent)

    monkeypatch.setattr(compiled_layers, "linears", linears)
    OPERATOR(torch.randn(rows, 1, 5), weights(2, 3), [None, torch.randn(3)], most_rows)
    assert asked == [concurrent]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_branches_of_a_captured_graph(dtype):
    """The same bits as sequential products, also from other inputs at replay."""
    inputs = torch.randn(7, 1, 512, device="cuda", dtype=dtype)
    matrices = [torch.randn(size, 512, device="cuda", dtype=dtype) for size in (512, 64, 63, 1000)]
    biases = [None, torch.randn(64, device="cuda", dtype=dtype), None, None]
    OPERATOR(inputs, matrices, biases, 7)  # creates cuBLAS's handles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = OPERATOR(inputs, matrices, biases, 7)
    for _ in range(3):
        inputs.normal_()
        graph.replay()
        assert all(map(torch.equal, outputs, OPERATOR(inputs, matrices, biases, 6)))


@pytest.mark.parametrize("axes", [(0, 1), (0, 2), (1, 2)], ids=str)
def test_the_operator_as_pytorch_checks_it(axes):
    inputs = torch.randn(5, 5, 5).transpose(*axes)
    arguments = inputs, weights(6, 2), [None, torch.randn(2)], 64
    torch.library.opcheck(OPERATOR, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=needs_gxx), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_compiled_model_by_inductor(device):
    """As close to the uncompiled model as without the rewrite, and in as many graphs."""
    model, ids = tiny_model("llama-gqa").to(device), torch.tensor([[5, 6, 7]], device=device)
    expected, errors, graphs = model(ids).logits, [], []
    for rows in (0, 64):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with CompiledLayers().installed(model, rows):
            errors.append((model(ids).logits - expected).abs().max().item())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert errors[1] <= 2 * errors[0]
    assert graphs[0] == graphs[1] > 0


def test_weights_can_be_swapped_where_pytorch_can_without_the_rewrite():
    """Versions of PyTorch differ in which weak references to weights a compilation leaves."""
    refused = []
    for rows in (0, 64):
        torch._dynamo.reset()
        model = tiny_model("llama-gqa")
        with CompiledLayers("aot_eager").installed(model, rows):
            model(torch.tensor([[5, 6, 7]]))
        weight = model.model.layers[0].self_attn.q_proj.weight
        try:
            torch.utils.swap_tensors(weight, nn.Parameter(weight.clone()))
        except RuntimeError as error:
            refused.append(str(error))
    assert len(refused) in (0, 2)


def test_models_share_their_compilations():
    """The backend is one object, however many models name it."""
    assert with_concurrent_linears("eager", 7) is with_concurrent_linears("eager", 7)
    counts, ids = [], torch.tensor([[5, 6, 7]])
    for _ in range(2):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        model = tiny_model("llama-gqa")
        with CompiledLayers("eager").installed(model, 7):
            model(ids)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    assert counts[0] > 0
    assert counts[1] == 0


def test_one_compilation_serves_all_numbers_of_rows_but_one():
    compiled: list[int] = []

    def backend(graph, inputs, **options):
        compiled.append(len(inputs))
        return graph.forward

    model, counts = tiny_model("llama-gqa"), []
    layers = CompiledLayers(backend)
    torch._dynamo.reset()
    for rows in (3, 5, 2, 64, 1, 7):
        ids = torch.randint(1, 90, (rows, 1))
        with layers.installed(model), torch.no_grad():
            found = model(ids).logits
        counts.append(len(compiled))
        assert torch.allclose(found, model(ids).logits, atol=1e-5)
    first, one = counts[0], counts[4] - counts[0]
    assert counts == [first] * 4 + [first + one] * 2
    assert first > 0
