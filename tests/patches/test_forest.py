"""Slim models with `enable`: nodes keep keys and values, what rows add is stored slim; tokens are those of stock."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE, CODEGEN_MAKES_TABLES_ONCE
from hf_fastdecode.attention.kv import SuffixLengths
from hf_fastdecode.attention.torch_operators.operators import BackendError
from hf_fastdecode.conversion.calibration import RoundedCache
from hf_fastdecode.conversion.to_slim import to_slim
from hf_fastdecode.kernels import failures
from hf_fastdecode.kernels.device import triton_is_installed
from hf_fastdecode.patches.layers import attention_layer, rotation

from ..cases import exhaustive_but
from ..generation.calls import tokens_embedded
from ..tiny_models import seeded, tiny_model
from .family_models import NOT_BY_KERNEL, PLANS, family_model, family_pair, pairs
from .slim_models import CALLS, PROMPTS, TEXT, VARIANTS, pair, relative

PAIRS = pairs("k", "k+r", "mixed", "x")


def both(model: PreTrainedModel, slim: PreTrainedModel, call: dict[str, Any]) -> tuple[Tensor, Tensor, list[int], Any]:
    """Tokens of the ordinary model in stock transformers and of the slim one with `enable`, and how it got them."""
    stock = seeded(lambda: model.generate(**PROMPTS, **call))
    with fd.enabled(slim), tokens_embedded(slim) as embedded:
        return stock, seeded(lambda: slim.generate(**PROMPTS, **call)), embedded, fd.explain(slim).last_call


@pytest.mark.parametrize(("name", "plan"), exhaustive_but(PAIRS[::2], PAIRS))
def test_samples_of_every_family(name: str, plan: str) -> None:
    model, slim = family_pair(name, plan)
    stock, found, embedded, report = both(model, slim, CALLS["samples"])
    assert torch.equal(found, stock)
    if name == "phi3-window" or ((name, plan) == ("codegen", "mixed") and not CODEGEN_MAKES_TABLES_ONCE):
        assert report.path == "stock"
        wanted = "a window of 40 tokens hides some" if name == "phi3-window" else "attention interface"
        assert wanted in report.reason
        return
    assert report.path == "shared"
    assert embedded == [71, *[6] * 7]  # prompts once
    assert report.mode == "eager"


@pytest.mark.parametrize(
    ("variant", "call"),
    [*(("plain", call) for call in CALLS), *((variant, "samples") for variant in VARIANTS if variant != "plain")],
)
def test_llama(variant: str, call: str) -> None:
    model, slim = pair("k+r", variant)
    stock, found, embedded, report = both(model, slim, CALLS[call])
    assert report.path == "shared"
    assert torch.equal(found, stock)
    assert embedded[0] == 71


def test_drafts_append_several_tokens() -> None:
    model, slim = pair("k+r")
    prompt = {name: part[:1] for name, part in PROMPTS.items()}
    stock = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    with fd.enabled(slim):
        cache = fd.prefill(slim, prompt["input_ids"])
        found = slim.generate(
            **prompt, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3, **{CACHE: cache}
        )
        assert fd.explain(slim).last_call.path == "shared"
    assert torch.equal(found, stock)


def test_rows_that_finish_leave() -> None:
    model, slim = pair("k+r")
    call = {**CALLS["samples"], "num_return_sequences": 8, "eos_token_id": list(range(3, 30)), "pad_token_id": 0}
    stock, found, embedded, report = both(model, slim, call)
    assert torch.equal(found, stock)
    assert report.compactions > 0
    assert embedded[-1] < 16


@pytest.mark.parametrize("copied", [None, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_suffixes_become_nodes_in_the_next_turn(copied: Any) -> None:
    model, slim = pair("k+r", "yarn")
    call = {"do_sample": True, "top_k": 0, "max_new_tokens": 9}
    with fd.enabled(slim):
        first = seeded(lambda: slim.generate(**PROMPTS, **call, num_return_sequences=2, return_dict_in_generate=True))
        mask = PROMPTS["attention_mask"].repeat_interleave(2, 0)
        ids = torch.cat([first.sequences, TEXT[:20].view(4, 5)], 1)
        mask = torch.cat([mask, torch.ones(4, 14, dtype=mask.dtype)], 1)
        cache = first[CACHE] if copied is None else copied(first[CACHE])
        with tokens_embedded(slim) as embedded:
            found = seeded(lambda: slim.generate(ids, attention_mask=mask, **call, **{CACHE: cache}))
    assert embedded[0] == 4 * 6  # what is new, with the last token of each row, which was never fed
    assert torch.equal(found, seeded(lambda: model.generate(ids, attention_mask=mask, **call)))


def test_an_empty_cache_after_a_pass_that_failed() -> None:
    """Its layers are gone, and the next pass makes those of the model again."""
    model, slim = pair("k+r")
    ids, cache = TEXT[None, :12], fd.SharedContextCache()

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    hook = slim.model.layers[1].register_forward_pre_hook(stop)
    with fd.enabled(slim), torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            slim(ids, **{CACHE: cache})
        hook.remove()
        for part in (ids, TEXT[None, 12:15]):
            logits = slim(part, **{CACHE: cache}).logits
        fork = slim(TEXT[None, 15:17], **{CACHE: cache.fork()}).logits
    with torch.no_grad():
        expected = model(TEXT[None, :17]).logits
    torch.testing.assert_close(logits, expected[:, 12:15], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(fork, expected[:, 15:], rtol=1e-3, atol=1e-3)


def test_a_loaded_cache_has_no_model_until_a_call() -> None:
    slim = pair("k+r")[1]
    with fd.enabled(slim):
        call = {"do_sample": False, "max_new_tokens": 3, "num_return_sequences": 1, "return_dict_in_generate": True}
        cache = pickle.loads(pickle.dumps(slim.generate(**PROMPTS, **call | {"num_beams": 2})[CACHE]))
    with pytest.raises(ValueError, match="the model whose layers make them is gone"):
        cache.fork()


@pytest.mark.parametrize("copied", ["cache", "model"])
def test_a_copied_cache_belongs_to_the_model_that_reads_it(copied: str) -> None:
    """Suffixes become nodes by the model of the latest call, not by the one that filled the cache."""
    model, slim = pair("k+r")[0], copy.deepcopy(pair("k+r")[1])
    ids, call = TEXT[None, :40], {"do_sample": False, "max_new_tokens": 9}
    cache = fd.prefill(fd.enable(slim, min_saved_tokens=0), ids)
    if copied == "cache":
        cache = pickle.loads(pickle.dumps(cache))
    else:
        slim = copy.deepcopy(slim)  # and the original is gone
    for _ in range(2):
        expected = model.generate(ids, **call)
        out = slim.generate(ids, **call, **{CACHE: cache}, return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
        assert fd.explain(slim).last_call.path == "shared"
        ids, cache = torch.cat([expected, TEXT[None, 100:105]], 1), out[CACHE]


@torch.no_grad()
@pytest.mark.parametrize("bound", [None, 4])
def test_rows_of_different_lengths(bound: int | None) -> None:
    """Rows accept different numbers of drafts; on a GPU the host only knows a bound on the lengths."""
    model, slim = pair("k+r")
    with fd.enabled(slim):
        cache = fd.prefill(slim, TEXT[None, :20])
        cache.batch_repeat_interleave(3)
        drafts = TEXT[20:32].view(3, 4)
        slim(drafts, **{CACHE: cache})
        cache.drop_last([1, 3, 2])
        if bound is not None:
            lengths = cache.state.suffixes.lengths
            assert lengths.longest < bound
            cache.state.suffixes.lengths = SuffixLengths(bound, lengths.per_row)
        found = slim(TEXT[40:46].view(3, 2), **{CACHE: cache}).logits[:, -1]
        cache.crop(-2)
        again = slim(TEXT[40:46].view(3, 2), **{CACHE: cache}).logits[:, -1]
    for row, kept in enumerate((3, 1, 2)):
        text = torch.cat([TEXT[:20], drafts[row, :kept], TEXT[40 + 2 * row : 42 + 2 * row]])
        torch.testing.assert_close(found[row], model(text[None]).logits[0, -1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(again, found, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_bytes_and_dtypes() -> None:
    """In a model in bf16 nodes are bf16, as in an ordinary cache, and suffixes fp16."""
    model = pair("k+r")[0]
    slim = to_slim(copy.deepcopy(model).bfloat16(), TEXT, plan=PLANS["k+r"])
    with fd.enabled(slim):
        cache = fd.prefill(slim, TEXT[None, :20])
        before = cache.nbytes
        cache.batch_repeat_interleave(5)
        slim(TEXT[20:35].view(5, 3), **{CACHE: cache})
    width, ranks = 64, 4 + 9
    assert before.stored == before.allocated == 20 * 2 * 2 * width * 2
    assert cache.nbytes.stored == before.stored + 5 * 3 * (2 * width + ranks) * 2
    assert cache.nbytes.stock == 5 * 23 * (2 * width + ranks) * 2
    storage = cache.layers[0].storage
    assert {part.dtype for part in storage.segments[0]} == {torch.bfloat16}
    assert {part.dtype for part in storage.suffix} == {torch.float16}


@torch.no_grad()
def test_bf16_is_as_accurate_as_the_ordinary_model() -> None:
    model = pair("k+r")[0]
    rounded = copy.deepcopy(model).bfloat16()
    slim = to_slim(rounded, TEXT, plan=PLANS["k+r"])
    oracle = copy.deepcopy(rounded).double()
    ids = TEXT[None, :60]
    expected = oracle(ids).logits[0, 40:]
    with fd.enabled(slim):
        cache = fd.prefill(slim, ids[:, :40])
        steps = [slim(ids[:, place : place + 1], **{CACHE: cache}).logits[0, 0] for place in range(40, 60)]
    assert relative(torch.stack(steps), expected) < 2 * relative(rounded(ids).logits[0, 40:], expected)


@torch.no_grad()
def test_suffixes_in_8_bits() -> None:
    model = pair("k+r")[0]
    slim = to_slim(model, TEXT, plan=PLANS["k+r"], cache_dtype="int8", tolerance=1e9)
    with fd.enabled(slim):
        cache = fd.prefill(slim, TEXT[None, :20])
        found = slim(TEXT[None, 20:35], **{CACHE: cache}).logits
        again = slim(TEXT[None, 35:40], **{CACHE: cache.fork()}).logits  # with the suffix as a node
    stock = DynamicCache()
    slim(TEXT[None, :20], **{CACHE: stock})
    by_stock = slim(TEXT[None, 20:35], **{CACHE: stock}).logits
    expected = model(TEXT[None, :40]).logits
    assert relative(found, expected[:, 20:35]) < relative(by_stock, expected[:, 20:35])  # nodes are not in 8 bits
    assert relative(again, expected[:, 35:]) < 2 * relative(by_stock, expected[:, 20:35])
    heads, width, ranks = 4, 64, (4, 9)
    assert cache.nbytes.stored == 20 * 2 * 2 * width * 4 + 15 * sum(width + 2 * heads + rank + 2 for rank in ranks)


@torch.no_grad()
@pytest.mark.parametrize("cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_suffixes_of_inputs(name: str, cache_dtype: str) -> None:
    """Many and few queries, suffixes of different lengths, and suffixes that became nodes."""
    model = family_model(name)
    slim = to_slim(model, TEXT, plan="x", cache_dtype=cache_dtype)
    bound = 1e-5
    if cache_dtype == "int8":  # the error of an ordinary cache in 8 bits, and as much again
        rounded = model(TEXT[None, :60], **{CACHE: RoundedCache(model.config, torch.int8)}).logits
        bound = 2 * relative(rounded, model(TEXT[None, :60]).logits)
    with fd.enabled(slim):
        cache = fd.prefill(slim, TEXT[None, :20])
        cache.batch_repeat_interleave(2)
        found = [slim(TEXT[20:60].view(2, 20), **{CACHE: cache}).logits]
        cache.drop_last([3, 0])
        found.append(slim(TEXT[60:64].view(2, 2), **{CACHE: cache}).logits)
        assert cache.nbytes.stored == 20 * 2 * 2 * 64 * 4 + (19 + 22) * 2 * (64 * 4 if cache_dtype == "auto" else 72)
        found.append(slim(TEXT[64:66].view(2, 1), **{CACHE: cache.fork()}).logits)
    for row, dropped in enumerate((3, 0)):
        parts = TEXT[20 + 20 * row : 40 + 20 * row], TEXT[60 + 2 * row : 62 + 2 * row], TEXT[64 + row : 65 + row]
        expected = model(torch.cat([TEXT[:20], parts[0]])[None]).logits[:, 20:]
        after = model(torch.cat([TEXT[:20], parts[0][: 20 - dropped], *parts[1:]])[None]).logits[:, -3:]
        error = relative(torch.cat([one[row] for one in found]), torch.cat([expected, after], 1)[0])
        assert error < bound


@torch.no_grad()
def test_a_cache_of_another_dtype_is_refused() -> None:
    """Suffixes of both models are fp16, nodes are not."""
    slim = to_slim(copy.deepcopy(pair("k+r")[0]).bfloat16(), TEXT, plan=PLANS["k+r"])
    with fd.enabled(slim):
        cache = fd.prefill(slim, TEXT[None, :20])
        slim.half()
        with pytest.raises(ValueError, match=r"holds keys in torch.bfloat16, and this pass computes torch.float16"):
            slim(TEXT[None, 20:23], **{CACHE: cache})


@torch.no_grad()
@pytest.mark.parametrize("positions", [[20, 21, 30], [20, 21, 21], [25, 26, 27]], ids=str)
def test_positions_that_do_not_follow_are_refused(positions: list[int]) -> None:
    slim = pair("k")[1]
    with fd.enabled(slim):
        cache = fd.prefill(slim, TEXT[None, :20])
        with pytest.raises(ValueError, match="must follow each row's tokens and rise by 1"):
            slim(TEXT[None, 20:23], **{CACHE: cache}, position_ids=torch.tensor([positions]))
        given = slim(TEXT[None, 20:23], **{CACHE: cache}, position_ids=torch.tensor([[20, 21, 22]])).logits
        cache.crop(-3)
        assert torch.equal(slim(TEXT[None, 20:23], **{CACHE: cache}).logits, given)


needs_kernels = pytest.mark.skipif(not triton_is_installed(), reason="needs Triton")


def assert_like_pytorch(model: PreTrainedModel, slim: PreTrainedModel, texts: Tensor, **backends: str) -> None:
    """Logits after forced tokens: with the kernel, at most twice the error of PyTorch's operators."""
    errors, oracle = {}, copy.deepcopy(model).double()(texts).logits[:, -1:]
    for name, backend in backends.items():
        with fd.enabled(slim, backend=backend):
            cache = fd.prefill(slim, texts[:, :20])
            for token in texts[:, 20:].split(1, 1):
                logits = slim(token, **{CACHE: cache}).logits
        errors[name] = relative(logits, oracle)
    assert errors["kernel"] < 2 * errors["pytorch"]


@needs_kernels
@pytest.mark.parametrize(
    ("name", "plan"), [("gpt2", "k"), ("gpt_neox", "k+r"), ("qwen2", "mixed"), ("stablelm", "mixed")]
)
def test_suffixes_by_kernel(name: str, plan: str) -> None:
    """Without RoPE, with partial RoPE, and with biases, beside layers that keep values."""
    model, slim = family_pair(name, plan)
    call = {**CALLS["samples"], "num_return_sequences": 2, "max_new_tokens": 5}
    stock = seeded(lambda: model.generate(**PROMPTS, **call))
    with fd.enabled(slim, backend="triton"):
        assert torch.equal(seeded(lambda: slim.generate(**PROMPTS, **call)), stock)
        assert "slim suffixes by slim_decode" in fd.explain(slim).last_call.layers[-1]


@needs_kernels
@pytest.mark.parametrize(
    ("name", "plan", "cache_dtype"), [("gpt2", "k", "fp8"), ("gpt_neox", "k+r", "int8"), ("qwen2", "mixed", "int8")]
)
def test_suffixes_in_8_bits_by_kernel(name: str, plan: str, cache_dtype: str) -> None:
    """Tokens of the same model by PyTorch's operators, on rows of equal and of different lengths."""
    slim = to_slim(family_model(name), TEXT, plan=PLANS[plan], cache_dtype=cache_dtype, tolerance=1e9)
    call = {**CALLS["samples"], "num_return_sequences": 2, "max_new_tokens": 5}
    with fd.enabled(slim, backend="plain"):
        expected = seeded(lambda: slim.generate(**PROMPTS, **call))
        assert "slim suffixes by PyTorch's operators" in fd.explain(slim).last_call.layers[-1]
    with fd.enabled(slim, backend="triton"):
        assert torch.equal(seeded(lambda: slim.generate(**PROMPTS, **call)), expected)
        assert "slim suffixes by slim_decode" in fd.explain(slim).last_call.layers[-1]


@needs_kernels
@torch.no_grad()
def test_the_kernel_copies_no_suffix_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is handed views of the cache, behind whose tokens a row has bytes of any value."""
    from hf_fastdecode.kernels.slim_decode import api

    slim = to_slim(pair("k+r")[0], TEXT, plan=PLANS["k+r"], cache_dtype="int8", tolerance=1e9)
    logits, handed = {}, []
    launch = api.launch_all
    monkeypatch.setattr(api, "launch_all", lambda given, *rest: (handed.append(given), launch(given, *rest)))
    for backend in ("triton", "plain"):
        with fd.enabled(slim, backend=backend):
            cache = fd.prefill(slim, TEXT[None, :20])
            cache.batch_repeat_interleave(2)
            for tokens in TEXT[20:28].view(4, 2, 1):
                slim(tokens, **{CACHE: cache})
            cache.drop_last([3, 0])
            for layer in cache.layers:
                for part in layer.storage.suffix:
                    part[0, :, 1:] = 255  # NaN as a scale
            handed.clear()
            logits[backend] = slim(TEXT[28:30].view(2, 1), **{CACHE: cache}).logits
            assert len(handed) == (2 if backend == "triton" else 0)
            memory = {part.untyped_storage().data_ptr() for layer in cache.layers for part in layer.storage.suffix}
            views = [part for given in handed for part in (given.keys, given.coordinates, *given.scales)]
            assert {part.untyped_storage().data_ptr() for part in views} <= memory
    assert relative(logits["triton"], logits["plain"]) < 1e-5


@needs_kernels
def test_a_kernel_that_fails_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_fastdecode.kernels.slim_decode import api as launches

    model, slim = pair("k+r")
    stock = seeded(lambda: model.generate(**PROMPTS, **CALLS["samples"]))
    monkeypatch.setattr(failures, "_failures", {})
    monkeypatch.setattr(launches, "slim_partials", None)
    monkeypatch.setattr(attention_layer, "takes_kernels", lambda *_: True)
    monkeypatch.setattr(rotation, "takes_kernels", lambda *_: True)
    with fd.enabled(slim):
        assert torch.equal(seeded(lambda: slim.generate(**PROMPTS, **CALLS["samples"])), stock)
        assert "slim suffixes by PyTorch's operators" in fd.explain(slim).last_call.layers[-1]
    with fd.enabled(slim, backend="triton"), pytest.raises(BackendError, match="the slim decode kernel cannot run"):
        slim.generate(**PROMPTS, **CALLS["samples"])


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "variant", "cache_dtype"),
    [
        (torch.float16, "plain", "auto"),
        (torch.bfloat16, "yarn", "auto"),
        (torch.float16, "plain", "int8"),
        (torch.bfloat16, "plain", "fp8"),
    ],
)
def test_kernel_in_half_precision(dtype: torch.dtype, variant: str, cache_dtype: str) -> None:
    model = copy.deepcopy(pair("k+r", variant)[0]).to(dtype)
    slim = to_slim(model, TEXT, plan=PLANS["k+r"], cache_dtype=cache_dtype, tolerance=1e9)
    # On a CPU "auto" is PyTorch's operators.
    assert_like_pytorch(model, slim, TEXT[:52].view(2, 26), kernel="triton", pytorch="auto")


@needs_kernels
@pytest.mark.parametrize(("name", "plan", "options", "reason"), NOT_BY_KERNEL)
def test_forced_kernels_are_refused(name: str, plan: str, options: dict[str, Any], reason: str) -> None:
    slim = to_slim(family_model(name), TEXT, plan=PLANS[plan], **options)
    with fd.enabled(slim, backend="triton"), pytest.raises(BackendError, match=reason):
        slim.generate(**PROMPTS, **CALLS["samples"])


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("cache_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("rank", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_suffixes_by_kernel_on_a_gpu(dtype: torch.dtype, rank: int, cache_dtype: str) -> None:
    """On clusters, where the GPU has them: logits after forced tokens, beside PyTorch's operators."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 512}
    model = tiny_model("llama-mha", **sizes, head_dim=64).to("cuda", dtype)
    layers = model.config.num_hidden_layers
    plan = (("k+r" if rank else "k", rank),) * layers
    slim = to_slim(model, TEXT, plan=plan, cache_dtype=cache_dtype, tolerance=1e9)
    assert_like_pytorch(model, slim, TEXT.cuda()[:240].view(2, 120), kernel="auto", pytorch="plain")
