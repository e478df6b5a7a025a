"""`enable` and its companions take what other libraries wrap around a model."""

import copy

import pytest
import torch
from torch import nn

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..short_calls import PROMPT, SAMPLING
from ..tiny_models import seeded


class PeftLike(nn.Module):
    """Keeps a model as PEFT does: in a tuner in a model."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


WRAPPERS = {
    "peft": PeftLike,
    "compile": torch.compile,
    "data_parallel": lambda model: nn.DataParallel(model),
    "both": lambda model: torch.compile(nn.DataParallel(PeftLike(model))),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapped_model_is_enabled_by_what_it_wraps(model, kind):
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    wrapper = WRAPPERS[kind](model)
    assert fd.enable(wrapper, mode="eager") is wrapper
    cache = fd.prefill(wrapper, PROMPT)
    assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})), expected)
    assert fd.explain(wrapper).last_call.path == "shared"
    assert str(fd.explain(wrapper)) == str(fd.explain(model))
    with fd.enabled(wrapper, mode="auto") as given:
        assert given is wrapper
    assert fd.disable(wrapper) is wrapper
    assert not fd.explain(model).enabled


def test_a_distributed_model(model):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(model)
        expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
        fd.enable(wrapper)
        assert torch.equal(seeded(lambda: wrapper.module.generate(**PROMPT, **SAMPLING)), expected)
        assert fd.explain(wrapper).last_call.path == "shared", fd.explain(wrapper).last_call.reason
    finally:
        torch.distributed.destroy_process_group()


def test_other_wrappers_are_told_what_to_pass(model):
    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = nn.ModuleList([model]), copy.deepcopy(model)

    class Engine:
        def __init__(self):
            self.llm = model

    with pytest.raises(TypeError, match=r"got Policy; pass its attribute 'actor\.0' or 'critic'"):
        fd.enable(Policy())
    with pytest.raises(TypeError, match="got Engine; pass its attribute 'llm'"):
        fd.explain(Engine())
