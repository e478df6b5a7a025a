"""Decode steps by kernels: over transformers' caches, and captured ones, in half precision against fp64."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.generation.steps.graph_capture import has_projections
from hf_fastdecode.kernels import failures
from hf_fastdecode.kernels.device import triton_is_installed
from hf_fastdecode.kernels.failures import Kernel, KernelFailedError
from hf_fastdecode.patches.layers import kernel_attention, rotation

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .family_models import PLANS, family_pair
from .slim_models import TEXT, relative, two_heads

pytestmark = pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")
PADDED = ragged_prompts(20, 13)
STEPS = 4


@pytest.fixture
def averaged(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """First slots of rows at each run of the kernel, which is interpreted on a CPU, as on a GPU it is not."""
    runs: list[Tensor | None] = []
    averages = kernel_attention.averages_by_kernel

    def recorded(*given: Any) -> Any:
        found = averages(*given)
        runs.append(given[5])
        return found

    monkeypatch.setattr(kernel_attention, "averages_by_kernel", recorded)
    if not torch.cuda.is_available():
        for module in (kernel_attention, rotation):
            monkeypatch.setattr(module, "takes_kernels", lambda *_: True)
    return runs


def generate(model: PreTrainedModel, prompt: dict[str, Tensor], **call: Any) -> Tensor:
    call = {"max_new_tokens": STEPS + 1, "min_new_tokens": STEPS + 1, "do_sample": False} | call
    return seeded(lambda: model.generate(**prompt, **call))


@pytest.mark.parametrize("call", [{}, {"num_beams": 2}, {"do_sample": True, "top_k": 0}], ids=str)
@pytest.mark.parametrize("prompt", [PADDED, {"input_ids": TEXT[None, :20]}], ids=["padded", "alone"])
def test_tokens_are_those_of_the_ordinary_model(averaged, prompt: dict[str, Tensor], call: dict[str, Any]) -> None:
    model, slim = two_heads()
    assert torch.equal(generate(slim, prompt, **call), generate(model, prompt, **call))
    assert len(averaged) == STEPS * len(slim.model.layers)
    expected = (PADDED["attention_mask"] == 0).sum(1).tolist() if prompt is PADDED else None
    for starts in averaged:
        assert (starts if starts is None else starts.unique().tolist()) == (expected and sorted(set(expected)))


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen2", "phi3-window"])
def test_families(averaged, name: str) -> None:
    """Without RoPE, with partial RoPE, with biases, and with a window that hides the oldest tokens."""
    model, slim = family_pair(name, "k")
    prompt = ragged_prompts(30, 70) if name == "phi3-window" else PADDED
    assert torch.equal(generate(slim, prompt), generate(model, prompt))
    assert len(averaged) == STEPS * 2


@pytest.mark.parametrize("cache_dtype", ["int8", "fp8"])
def test_8_bits(averaged, monkeypatch: pytest.MonkeyPatch, cache_dtype: str) -> None:
    slim = to_slim(two_heads()[0], TEXT, plan=PLANS["k+r"], cache_dtype=cache_dtype, tolerance=1e9)
    found = generate(slim, PADDED)
    assert len(averaged) == STEPS * len(slim.model.layers)
    monkeypatch.setattr(kernel_attention, "takes_kernels", lambda *_: False)
    assert torch.equal(found, generate(slim, PADDED))


@torch.no_grad()
def test_static_caches_and_masks_of_transformers(averaged) -> None:
    """Their free slots are hidden, as tokens of padding are."""
    model, slim = two_heads()
    options = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(slim, PADDED, **options), generate(model, PADDED, **options))
    assert len(averaged) == STEPS * len(slim.model.layers)


@torch.no_grad()
def test_a_mask_is_looked_at_once_in_a_pass(averaged, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Tensor] = []
    range_of = kernel_attention._range_of
    monkeypatch.setattr(kernel_attention, "_range_of", lambda seen: looked.append(seen) or range_of(seen))
    generate(two_heads()[1], PADDED)
    assert len(looked) == STEPS
    assert len(kernel_attention._visible) == 0


@torch.no_grad()
@pytest.mark.parametrize("hidden", ["gap", "all", "added"])
def test_masks_that_the_kernel_does_not_take(averaged, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    slim, cache = two_heads()[1], DynamicCache()
    slim(TEXT[None, :20], **{CACHE: cache})
    mask = torch.ones(1, 1, 1, 21, dtype=torch.bool)
    mask[..., 7:9] = False
    if hidden == "all":
        mask[:] = False
    if hidden == "added":
        mask = torch.zeros(1, 1, 1, 21).masked_fill(~mask, torch.finfo(torch.float32).min)
    logits = slim(TEXT[None, 20:21], attention_mask=mask, **{CACHE: cache}).logits
    assert not averaged
    assert logits.isfinite().all()


@pytest.mark.parametrize("way", ["gradients", "several", "eager", "threshold", "inputs", "interleaved"])
def test_steps_of_pytorchs_operators(averaged, way: str) -> None:
    model, slim = two_heads("k")
    if way in ("inputs", "interleaved"):
        model, slim = family_pair("gpt2", "x") if way == "inputs" else family_pair("codegen", "k")
    slim = copy.deepcopy(slim)
    if way == "eager":
        slim.set_attn_implementation("eager")
    slim.config.slim_sparsity_threshold = 1e-9 if way == "threshold" else 0.0
    cache, count = DynamicCache(), 2 if way == "several" else 1
    with torch.set_grad_enabled(way == "gradients"):
        slim(TEXT[None, :20], **{CACHE: cache})
        found = slim(TEXT[None, 20 : 20 + count], **{CACHE: cache}).logits
    expected = model(TEXT[None, : 20 + count]).logits[:, -count:]
    assert not averaged
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def test_inference_mode(averaged) -> None:
    model, slim = two_heads()
    with torch.inference_mode():
        assert torch.equal(generate(slim, PADDED), generate(model, PADDED))
    assert averaged


def test_a_kernel_that_fails_gives_way(averaged, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fastdecode.kernels.slim_decode import api as launches

    model, slim = two_heads()
    monkeypatch.setattr(failures, "_failures", {})
    monkeypatch.setattr(launches, "slim_partials", None)
    assert torch.equal(generate(slim, PADDED), generate(model, PADDED))
    assert not averaged


@torch.no_grad()
def errors(slim: PreTrainedModel, oracle: Tensor, text: Tensor, mask: Tensor | None) -> float:
    """Error of the logits of the tokens behind the first 40, forced one by one."""
    cache, logits = DynamicCache(), []
    for start, end in [(0, 40), *((at, at + 1) for at in range(40, text.shape[1]))]:
        seen = {} if mask is None else {"attention_mask": mask[:, :end]}
        if mask is not None:
            seen["position_ids"] = (mask[:, :end].cumsum(1) - 1).clamp(0)[:, start:]
        logits.append(slim(text[:, start:end], **{CACHE: cache}, **seen).logits[:, -1:])
    return relative(torch.cat(logits[1:], 1), oracle)


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("plan", ["k", "k+r"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_on_a_gpu(averaged, monkeypatch, dtype, plan: str, cache_dtype: str, padded: bool) -> None:
    """At most twice the error of PyTorch's operators, over heads as clusters take them."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = tiny_model("llama-mha", **sizes).to("cuda", dtype)
    plan = (("k+r", 64), ("k+r", 32)) if plan == "k+r" else plan
    slim = to_slim(model, TEXT, plan=plan, cache_dtype=cache_dtype, tolerance=1e9)
    text, mask = TEXT[:120].view(2, 60).cuda(), None
    if padded:
        mask = torch.ones_like(text)
        mask[1, :9] = 0
    positions = {} if mask is None else {"position_ids": (mask.cumsum(1) - 1).clamp(0)}
    with torch.no_grad():
        oracle = copy.deepcopy(model).double()(text, attention_mask=mask, **positions).logits[:, 40:]
    by_kernel = errors(slim, oracle, text, mask)
    assert len(averaged) == 20 * len(slim.model.layers)
    monkeypatch.setattr(kernel_attention, "takes_kernels", lambda *_: False)
    assert by_kernel < 2 * errors(slim, oracle, text, mask)
    assert len(averaged) == 20 * len(slim.model.layers)


SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}


def errors_of_logits(
    model: PreTrainedModel, slim: PreTrainedModel, prompt: Tensor, options: dict[str, Any] | None = None, **call: Any
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
    from hf_fastdecode.kernels import slim_append

    appended: list[Any] = []
    append = slim_append.append_token
    monkeypatch.setattr(slim_append, "append_token", lambda *given: (appended.append(given), append(*given))[1])
    model = copy.deepcopy(two_heads()[0]).half()
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
    slim: Any = to_slim(copy.deepcopy(two_heads()[0]).half(), TEXT, plan=PLANS["k+r"])
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
    for name in ("stablelm", "stablelm-norm", "cohere", "cohere-norm"):
        _, slim = family_pair(name, "k")
        assert slim.model.layers[0].self_attn.normalizes == name.endswith("-norm")


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
    monkeypatch.setattr(kernel_attention, "stream_for", lambda *_: branch)
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
