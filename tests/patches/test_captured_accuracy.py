"""Accuracy of captured decode steps of slim models: their logits in half precision against fp64."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.generation.steps.projections import has_projections
from hf_fastdecode.kernels import failures
from hf_fastdecode.kernels.failures import Kernel, KernelFailedError
from hf_fastdecode.kernels.installed import triton_is_installed
from hf_fastdecode.patches.architectures.slim_cohere import SlimCohereAttention
from hf_fastdecode.patches.architectures.slim_stablelm import SlimStableLmAttention
from hf_fastdecode.patches.layers import kernel_attention

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .family_models import PLANS
from .slim_models import TEXT, pair, relative

pytestmark = pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}


def errors_of_logits(
    model: PreTrainedModel,
    slim: PreTrainedModel,
    prompt: Tensor,
    options: dict[str, Any] | None = None,
    **call: Any,
) -> dict[str, float]:
    """Error of the logits after each drawn token, by mode, each beside the tokens that were drawn in it."""
    oracle, errors = copy.deepcopy(model).double(), {}
    recorded = {"output_logits": True, "return_dict_in_generate": True}
    for mode in ("eager", "graph"):
        with fd.enabled(slim, mode=mode, backend="triton" if mode == "graph" else "auto", **(options or {})):
            out = seeded(lambda: slim.generate(prompt, **SAMPLED | call, **recorded))
            assert fd.explain(slim).last_call.mode == mode
        with torch.no_grad():
            expected = oracle(out.sequences[:, :-1]).logits[:, prompt.shape[1] :]
        errors[mode] = relative(torch.stack(out.logits[1:], 1), expected)
    return errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there these steps are captured")
@pytest.mark.parametrize(("launches", "fuse"), [("few", True), ("many", True), ("many", False)])
def test_half_precision(launches: str, fuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16: bf16 products of interpreted kernels are wrong."""
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)  # steps run uncaptured, and interpreted
    refusal = "of this test" if launches == "many" and fuse else None
    monkeypatch.setattr(kernel_attention, "products_refusal", lambda *_: refusal)
    from hf_fastdecode.kernels.slim_append import api as slim_append

    appended: list[Any] = []
    append = slim_append.append_token
    monkeypatch.setattr(slim_append, "append_token", lambda *given: (appended.append(given), append(*given))[1])
    model = copy.deepcopy(pair("k+r")[0]).half()
    slim = to_slim(model, TEXT, plan=PLANS["k+r"])
    options = {} if fuse else {"fuse_projections": False}
    errors = errors_of_logits(model, slim, TEXT[None, :30], options, num_return_sequences=2, max_new_tokens=8)
    assert errors["graph"] < 2 * errors["eager"]
    assert bool(appended) == (launches == "few")


@pytest.fixture
def slim_layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A slim layer whose captured steps kernels serve."""
    monkeypatch.setattr(kernel_attention, "products_refusal", lambda *_: None)
    monkeypatch.setattr(kernel_attention, "fuses_products", lambda: True)
    slim: Any = to_slim(copy.deepcopy(pair("k+r")[0]).half(), TEXT, plan=PLANS["k+r"])
    return slim.model.layers[0].self_attn


def step_inputs(layer: Any) -> Tensor:
    return torch.zeros(2, 1, layer.q_proj.in_features, dtype=torch.float16)


@pytest.mark.parametrize("kernel", [Kernel.PRODUCT, Kernel.APPEND])
def test_kernels_that_failed(slim_layer: Any, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators serve the layer from then on; other kernels stay."""
    inputs = step_inputs(slim_layer)
    assert kernel_attention.step_refusal(slim_layer, inputs) is None
    monkeypatch.setattr(failures, "_failures", {})
    with pytest.raises(KernelFailedError), failures.launching(kernel, inputs.device):
        raise RuntimeError("no such instruction")
    assert "no such instruction" in (kernel_attention.step_refusal(slim_layer, inputs) or "")
    assert failures.failure(Kernel.POINTWISE, inputs.device) is None


@pytest.mark.parametrize("name", ["q_proj", "k_proj"])
@pytest.mark.parametrize("change", ["forward", "hook"])
def test_changed_projections_are_called(slim_layer: Any, name: str, change: str) -> None:
    module, inputs = getattr(slim_layer, name), step_inputs(slim_layer)
    assert kernel_attention.step_refusal(slim_layer, inputs) is None
    if change == "hook":
        module.register_forward_hook(lambda *_: None)
    else:
        module.forward = lambda x: 2 * type(module).forward(module, x)
    assert kernel_attention.step_refusal(slim_layer, inputs) == "they take plain projections, without hooks"


def test_a_forward_that_another_library_gave_linear_layers(slim_layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, stock = step_inputs(slim_layer), nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * stock(self, x))
    assert "plain projections" in (kernel_attention.step_refusal(slim_layer, inputs) or "")
    assert not has_projections(slim_layer)


def test_configs_decide_whether_queries_are_normalised() -> None:
    for family, flag in ((SlimStableLmAttention, "qk_layernorm"), (SlimCohereAttention, "use_qk_norm")):
        layer: Any = family.__new__(family)
        nn.Module.__init__(layer)
        for has in (True, False):
            setattr(layer, flag, has)
            assert layer.normalizes_queries == layer.normalizes_keys == has


@pytest.mark.parametrize("within", [True, False])
def test_a_branch_is_joined_after_an_error(within: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture whose branch is not joined could not end."""
    order: list[str] = []

    class Stream:
        def __init__(self, name: str):
            self.name = name

        def wait_stream(self, other: Any) -> None:
            order.append(f"{self.name} waits for {other.name}")

    def fail() -> None:
        with kernel_attention._branch(torch.device("cuda")) as context:
            with context:
                if within:
                    raise RuntimeError
            raise RuntimeError

    branch, current = Stream("branch"), Stream("current")
    monkeypatch.setattr(kernel_attention, "_branch_stream", lambda _: branch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    with pytest.raises(RuntimeError):
        fail()
    assert order == ["branch waits for current", "current waits for branch"]


@pytest.mark.gpu
@pytest.mark.parametrize(("plan", "width"), [("k", 512), ("k+r", 512), ("k", 1024), ("k+r", 1024), ("mixed", 1024)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_captured_on_a_gpu(dtype: torch.dtype, plan: str, width: int) -> None:
    """Logits as accurate as of eager steps, the same bits in every run, and suffixes that outgrow a capture.

    Projections of 1,024 numbers are products of few rows.
    """
    heads = width // 64
    sizes = {"hidden_size": width, "intermediate_size": 512, "num_attention_heads": heads}
    sizes["num_key_value_heads"] = heads
    model = tiny_model("llama-mha", **sizes, head_dim=64).to("cuda", dtype)
    plans = {"k": (("k", 0),) * 2, "k+r": (("k+r", 64),) * 2, "mixed": (("kv", 0), ("k+r", 64))}
    slim = to_slim(copy.deepcopy(model), TEXT, plan=plans[plan])
    prompt = ragged_prompts(300)["input_ids"].cuda()
    errors = errors_of_logits(model, slim, prompt, num_return_sequences=6, max_new_tokens=60)
    assert errors["graph"] < 2 * errors["eager"]
    call = {key: value.cuda() for key, value in ragged_prompts(300, 200, shared=100).items()}
    call |= SAMPLED | {"num_return_sequences": 3, "max_new_tokens": 300}
    with fd.enabled(slim, mode="eager"):
        eager = seeded(lambda: slim.generate(**call))
    with fd.enabled(slim, mode="graph"):
        captured = [seeded(lambda: slim.generate(**call)) for _ in range(2)]
        report = fd.explain(slim).last_call
    assert (report.mode, report.captures) == ("graph", 2)  # with capacities of 256 tokens, and of all
    assert torch.equal(*captured)
    # Nodes are attended to by other operators, whose rounding sooner or later sets rows apart.
    assert (captured[0][:, 300:320] == eager[:, 300:320]).float().mean() > 0.2


@pytest.mark.gpu
@pytest.mark.parametrize("head", [0, 100])
@pytest.mark.parametrize("plan", ["k", "k+r"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_prompts_in_suffixes_on_a_gpu(dtype: torch.dtype, plan: str, head: int) -> None:
    """Prompts of single rows, behind a head that they share, or none: logits as accurate as with nodes alone."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 512}
    model = tiny_model("llama-mha", **sizes, head_dim=64).to("cuda", dtype)
    slim = to_slim(copy.deepcopy(model), TEXT, plan={"k": "k", "k+r": (("k+r", 64),) * 2}[plan])
    prompts = ragged_prompts(300, 300, 300, shared=head)["input_ids"].cuda()
    call = {"num_return_sequences": 1, "max_new_tokens": 40}
    errors = errors_of_logits(model, slim, prompts, **call)
    in_chunks = errors_of_logits(model, slim, prompts, **call, options={"max_prefill_tokens": 64})
    in_nodes = errors_of_logits(model, slim, prompts, **call, options={"reuse_prefix": True})
    assert max(*errors.values(), *in_chunks.values()) < 2 * min(in_nodes.values())
    for mode, path in {"graph": "captured", "eager": "slim_decode"}.items():
        with fd.enabled(slim, mode=mode):
            slim.generate(prompts, max_new_tokens=4, do_sample=False)
            report = fd.explain(slim).last_call
        assert (report.mode, report.stored_tokens, report.own_tokens) == (mode, head, 3 * (300 - head))
        assert path in report.layers[0]
