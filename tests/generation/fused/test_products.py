"""Products of captured steps by the kernel for few rows: the same tokens, and where modules keep their own code."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

import hf_fastdecode as fd
from hf_fastdecode.generation.fused import gated
from hf_fastdecode.generation.fused.gated import RowProducts, products_here
from hf_fastdecode.generation.fused.modules import FusedModules
from hf_fastdecode.generation.fused.norms import WaitingSums
from hf_fastdecode.generation.steps import captured_prefill, modes
from hf_fastdecode.generation.steps.graph_capture import FusedProjections
from hf_fastdecode.kernels.device import MOST_COUNTERS
from hf_fastdecode.kernels.row_products import api

from ...tiny_models import ragged_prompts, seeded, tiny_model
from ..calls import as_in_stock
from ..uncaptured import on_the_cpu
from .half_models import fail

SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 4}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts launches of the kernel, by operator and number of weights."""
    counts: Counter[str] = Counter()

    def counted(name: str, weights: Any) -> Any:
        own = getattr(api, name)

        def run(*args: Any) -> Any:
            counts[f"{name} {weights(args)}"] += 1
            return own(*args)

        return run

    monkeypatch.setattr(api, "row_products", counted("row_products", lambda args: len(args[1])))
    monkeypatch.setattr(api, "gated_product", counted("gated_product", lambda args: 2))
    return counts


@pytest.fixture
def served(launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches, which take any device and size; captured steps run uncaptured."""

    def refusal(inputs: Any, weights: Any, biases: Any) -> str | None:
        return None if inputs.shape[-1] % 64 == 0 and inputs.shape[:-1].numel() <= 32 else "other rows"

    monkeypatch.setattr(gated, "refusal", refusal)
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    return launches


@on_the_cpu
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "gemma2"])  # qwen2's projections have biases
def test_captured_steps_give_stock_tokens(served: Counter[str], name: str) -> None:
    model = tiny_model(name, intermediate_size=128)
    call = ragged_prompts(41, 36, shared=33) | SAMPLING
    as_in_stock(model, lambda: model.generate(**call), mode="graph", backend="triton")
    assert served["row_products 3"] == served["row_products 2"] > 0  # modules run as kernels in half precision only
    assert served["row_products 1"] > 0


@on_the_cpu
def test_switched_off(served: Counter[str]) -> None:
    model = tiny_model("llama-gqa", intermediate_size=128)
    with fd.enabled(model, mode="graph", backend="triton", fuse_projections=False):
        model.generate(**ragged_prompts(41), **SAMPLING)
    assert not served


def half_layer() -> tuple[nn.Module, torch.Tensor]:
    """A gated module and its input in fp16, as kernels of other modules take them."""
    model = tiny_model("llama-gqa", intermediate_size=128).half()
    x = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0)).half()
    return model, x


@on_the_cpu
@pytest.mark.parametrize("change", ["hook", "another library's forward"])
def test_code_of_projections_runs(served: Counter[str], change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = half_layer()
    mlp, own = model.model.layers[0].mlp, nn.Linear.forward
    with torch.no_grad(), FusedModules(model).installed(), FusedProjections(model):
        before = mlp(x)
        assert served.pop("gated_product 2") == 1
        if change == "hook":
            mlp.gate_proj.register_forward_hook(lambda module, inputs, output: output * 2)
        else:
            monkeypatch.setattr(nn.Linear, "forward", lambda self, inputs: own(self, inputs) * 2)
        changed = mlp(x)
    assert "gated_product 2" not in served
    with torch.no_grad():
        torch.testing.assert_close(changed, mlp(x), rtol=1e-2, atol=1e-4)
    assert not torch.equal(changed, before)


@on_the_cpu
def test_adapters_keep_their_products(served: Counter[str]) -> None:
    """A subclass of `nn.Linear` computes more than a product."""

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model, x = half_layer()
    mlp = model.model.layers[0].mlp
    mlp.up_proj.__class__ = Doubled
    with torch.no_grad(), FusedModules(model).installed(), FusedProjections(model):
        found = mlp(x)
    assert served == {"row_products 1": 3}
    with torch.no_grad():
        torch.testing.assert_close(found, mlp(x), rtol=1e-2, atol=1e-4)


@on_the_cpu
def test_sums_are_computed_before_their_products(served: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no norm stands between a sum and the module that takes it."""
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full(x.shape, torch.nan, dtype=x.dtype, device=x.device))
    model, first = half_layer()
    mlp, second = model.model.layers[0].mlp, first.flip(0)
    with torch.no_grad():
        expected = mlp(first + second)
        with FusedModules(model).installed(), FusedProjections(model), WaitingSums() as sums:
            total = first + second
            assert sums.waits(total)
            found = mlp(total)
            assert not sums.waits(total)
    assert served == {"gated_product 2": 1, "row_products 1": 1}
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)


@on_the_cpu
def test_modules_that_the_user_has_compiled(served: Counter[str]) -> None:
    """Each keeps its code, in one graph."""
    model, _ = half_layer()
    ids = torch.tensor([[5, 6, 7]])
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        expected = model(ids).logits
        torch._dynamo.reset()
        for layer in model.model.layers:
            layer.compile(backend=backend)
        with FusedModules(model).installed(), FusedProjections(model), WaitingSums():
            found = model(ids).logits
    assert len(graphs) == len(model.model.layers)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


@on_the_cpu
def test_a_kernel_that_fails(served: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's products take over."""
    monkeypatch.setattr(api, "row_products", fail)
    monkeypatch.setattr(api, "gated_product", fail)
    model = tiny_model("llama-gqa", intermediate_size=128)
    call = ragged_prompts(41) | SAMPLING
    as_in_stock(model, lambda: model.generate(**call), mode="graph", backend="triton")


def test_only_within() -> None:
    assert products_here() is None
    with FusedProjections(tiny_model("llama-gqa")):
        assert isinstance(products_here(), RowProducts)
    assert products_here() is None


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 32, 40, 128])
def test_captured_steps_on_a_gpu(rows: int, launches: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of several replays, whose products are added up in parts: error at most twice stock's."""
    monkeypatch.setattr(captured_prefill, "_SIZES", ())  # its second pass would be captured, and round otherwise
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4}
    model = tiny_model("llama-gqa", **sizes).cuda()
    prompt = {key: value.cuda() for key, value in ragged_prompts(70).items()}
    call = prompt | {"num_return_sequences": rows, "do_sample": True, "top_k": 0, "max_new_tokens": 6}
    call |= {"output_logits": True, "return_dict_in_generate": True}
    model.bfloat16()
    weights = {name: value.float() for name, value in model.state_dict().items()}
    with fd.enabled(model, mode="graph"):
        out = seeded(lambda: model.generate(**call))
        again = seeded(lambda: model.generate(**call))
    assert launches.keys() == {"row_products 3", "row_products 1", "gated_product 2"}
    assert torch.equal(torch.stack(out.logits), torch.stack(again.logits))
    ids = out.sequences[:, :-1]
    last = len(out.logits)
    with torch.no_grad():
        stock = model(ids).logits[:, -last:].float()
        exact = model.float().requires_grad_(False)
        exact.load_state_dict(weights)
        exact = exact(ids).logits[:, -last:]
    found = torch.stack(out.logits, dim=1).float()
    assert (found - exact).norm() <= 2 * (stock - exact).norm()


@pytest.mark.gpu
def test_branches_count_by_themselves() -> None:
    """Products whose parts arrive at the same time, on several streams."""
    device, own = torch.device("cuda"), RowProducts()
    inputs = torch.randn(4, 4096, device=device).half()
    weights = [torch.randn(1024, 4096, device=device).half() for _ in range(3)]

    def product(weight: torch.Tensor) -> torch.Tensor:
        (found,) = own.linears(inputs, [weight], [None]) or [None]
        assert found is not None
        return found

    streams = [torch.cuda.Stream() for _ in weights]
    with torch.no_grad():
        expected = [product(weight) for weight in weights]
        torch.cuda.synchronize()
        for _ in range(20):
            found = []
            for stream, weight in zip(streams, weights, strict=True):
                with torch.cuda.stream(stream):
                    found.append(product(weight))
            torch.cuda.synchronize()
            assert all(map(torch.equal, found, expected))


@pytest.mark.gpu
def test_a_capture_has_counters_of_its_own() -> None:
    """Which another capture of the pool may write to between replays."""
    device, shared = torch.device("cuda"), RowProducts()
    inputs, weight = torch.randn(4, 4096, device=device).half(), torch.randn(1024, 4096, device=device).half()
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.stream(stream):
        (eager,) = shared.linears(inputs, [weight], [None]) or [None]
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            (captured,) = shared.linears(inputs, [weight], [None]) or [None]
        where = next(counts.data_ptr() for (_, capturing), counts in shared._arrived.items() if capturing)
        del shared
        with torch.cuda.graph(other, pool=pool, stream=stream):
            noise = [torch.ones(MOST_COUNTERS, dtype=torch.int32, device=device) for _ in range(8)]
        assert where in {one.data_ptr() for one in noise}
        assert eager is not None
        assert captured is not None
        for _ in range(2):
            captured.fill_(torch.nan)
            other.replay()
            graph.replay()
            assert torch.equal(eager, captured)
    torch.testing.assert_close(eager, F.linear(inputs, weight), rtol=1e-2, atol=0.5)
