"""The decode kernels in calls of `generate` and passes over a cache: tokens and logits beside stock's."""

import copy

import pytest
import torch
from transformers import LogitsProcessor

import hf_fastdecode as fd

from ..tiny_models import ragged_prompts, seeded, tiny_model

pytest.importorskip("triton")
from hf_fastdecode._compat import CACHE

INTERPRETED = not torch.cuda.is_available()


@pytest.mark.parametrize("name", ["llama-mha", "llama-gqa", "llama-mqa", "gpt2"])
def test_generate_gives_stock_tokens(name):
    """Interpreted in fp32, where the tokens must be stock's."""
    if not INTERPRETED:
        pytest.skip("float32 is refused on a GPU")
    model = tiny_model(name)
    arguments = {**ragged_prompts(41, 36, shared=33), "num_return_sequences": 2, "max_new_tokens": 4}
    arguments |= {"do_sample": True, "top_k": 0}
    stock = seeded(lambda: model.generate(**arguments))
    with fd.enabled(model, backend="triton"):
        assert torch.equal(seeded(lambda: model.generate(**arguments)), stock)
        assert "by triton" in "".join(fd.explain(model).last_call.layers)


def test_a_copied_cache_reads_its_own_memory():
    """Tables of addresses are not copied with a cache: they would point into the original."""
    if not INTERPRETED:
        pytest.skip("float32 is refused on a GPU")
    model = tiny_model("llama-gqa")
    token = torch.full((1, 1), 5)
    with fd.enabled(model, backend="triton"), torch.no_grad():
        cache = fd.prefill(model, ragged_prompts(40)["input_ids"])
        model(token, **{CACHE: cache}, position_ids=torch.full((1, 1), 40))
        twin = copy.deepcopy(cache)
        expected = model(token, **{CACHE: twin}, position_ids=torch.full((1, 1), 41)).logits
        twin.crop(-1)
        for segment in cache.layers[0].storage.segments.values():
            segment.keys.zero_()
        again = model(token, **{CACHE: twin}, position_ids=torch.full((1, 1), 41)).logits
    assert torch.equal(again, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama-mha", "llama-gqa"])
def test_generate_on_a_gpu_errs_no_more_than_stock(name):
    """Logits of a bf16 model fed the same tokens, by steps: error against fp64 at most twice stock's."""
    arguments = {"hidden_size": 256, "num_hidden_layers": 2}
    exact = tiny_model(name, **arguments).double().cuda()
    model = tiny_model(name, **arguments).bfloat16().cuda()
    prompt = {key: value.cuda() for key, value in ragged_prompts(300).items()}
    out = exact.generate(**prompt, num_return_sequences=8, do_sample=True, top_k=0, max_new_tokens=40)

    class Forced(LogitsProcessor):
        def __call__(self, input_ids, scores):
            chosen = out[:, input_ids.shape[1]]
            return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)

    def logits(model):
        options = {"logits_processor": [Forced()], "output_logits": True, "return_dict_in_generate": True}
        run = model.generate(**prompt, num_return_sequences=8, do_sample=True, max_new_tokens=40, **options)
        return torch.stack(run.logits, 1).double()

    oracle, stock = logits(exact), logits(model)
    with fd.enabled(model):
        shared = logits(model)
        assert "by triton" in "".join(fd.explain(model).last_call.layers)
    assert (shared - oracle).norm() <= 2 * (stock - oracle).norm()
    assert (shared - oracle).abs().max() <= 2 * (stock - oracle).abs().max()
