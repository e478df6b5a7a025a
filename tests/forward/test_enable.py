"""`enable` takes models that do not generate, and modules with heads of their own that hold a model."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

import hf_fastdecode as fd
from hf_fastdecode.generation.model_state import state_of

from ..short_calls import PROMPT, SAMPLING
from ..tiny_models import ARCHITECTURES, VOCABULARY, tiny_model

KINDS = {
    "reward": (AutoModelForSequenceClassification, "llama-gqa"),
    "tokens": (AutoModelForTokenClassification, "qwen3"),
    "decoder": (AutoModel, "llama-gqa"),
    "decoder-gpt2": (AutoModel, "gpt2"),
    "bert": (AutoModelForSequenceClassification, "bert"),
}
_OTHERS = {"bert": ("bert", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})}
IDS = torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :4] = 0


def made(kind: str) -> nn.Module:
    """A tiny model of the kind, in eval mode."""
    auto, name = KINDS[kind]
    model_type, arguments = (ARCHITECTURES | _OTHERS)[name]
    torch.manual_seed(0)
    labels = {"num_labels": 1} if kind == "reward" else {}
    config = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, pad_token_id=0, **arguments, **labels)
    return auto.from_config(config).eval()


def touched(model):
    """The attributes of a model's modules, by identity."""
    return [{name: id(value) for name, value in vars(module).items()} for module in model.modules()]


def outputs(model):
    """What a pass puts out, and the gradients of all parameters."""
    model.zero_grad()
    out = model(IDS, attention_mask=MASK)[0]
    out.sum().backward()
    return [out.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


@pytest.fixture(params=KINDS)
def other(request):
    return made(request.param)


class Critic(nn.Module):
    """A value head beside a model, which is under a name of its own."""

    def __init__(self, **models):
        super().__init__()
        self.v_head = nn.Linear(64, 1)
        for name, model in models.items():
            setattr(self, name, model)


def test_a_model_that_does_not_generate_is_enabled_and_disabled(other):
    before, expected = touched(other), outputs(other)
    assert fd.enable(other) is other
    assert fd.explain(other).enabled
    assert all(map(torch.equal, outputs(other), expected))
    fd.enable(other, min_saved_tokens=7)
    assert state_of(other).options.min_saved_tokens == 7
    assert fd.disable(fd.disable(other)) is other
    other.zero_grad()
    assert touched(other) == before
    with pytest.raises(ZeroDivisionError), fd.enabled(other), fd.enabled(other, mode="eager"):
        raise ZeroDivisionError
    assert touched(other) == before


def test_explain_says_that_it_does_not_generate(other):
    name = type(other).__name__
    assert str(fd.explain(other)) == f"{name}: not enabled; call hf_fastdecode.enable(model)"
    with fd.enabled(other):
        report = fd.explain(other)
        assert not report.generates
        assert report.last_call is None
        assert str(report).splitlines()[0] == f"{name}: enabled, 2 layers, it does not generate"
        assert "generate call" not in str(report)


def test_prefill_is_for_models_that_generate(other):
    with (
        fd.enabled(other),
        pytest.raises(
            ValueError, match=rf"prefill computes prompts for generate, and {type(other).__name__} does not"
        ),
    ):
        fd.prefill(other, IDS)
    assert not hasattr(other, "generate")


def test_copies_of_an_enabled_model(other, tmp_path):
    """A deep copy is enabled by itself, a pickled one is not; a saved one and its state are stock's."""
    expected, state = outputs(other), list(other.state_dict())
    fd.enable(other, min_saved_tokens=7)
    assert list(other.state_dict()) == state
    twin, loaded = copy.deepcopy(other), pickle.loads(pickle.dumps(other))
    other.save_pretrained(tmp_path)
    assert "hf_fastdecode" not in (tmp_path / "config.json").read_text()
    saved = type(other).from_pretrained(tmp_path)
    fd.disable(other)
    assert state_of(twin).options.min_saved_tokens == 7
    assert not fd.explain(loaded).enabled
    assert not fd.explain(saved).enabled
    for copied in (twin, loaded, saved):
        assert all(map(torch.equal, outputs(copied), expected))
        with fd.enabled(copied):
            assert fd.explain(copied).enabled


def test_a_model_is_trained_by_a_trainer_that_enables_it(tmp_path):
    def trained(*callbacks):
        model = made("reward")
        rows = [{"input_ids": ids, "labels": torch.tensor(1.0)} for ids in IDS]
        arguments = TrainingArguments(tmp_path, use_cpu=True, max_steps=2, report_to="none", save_strategy="no")
        Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[*callbacks]).train()
        assert not fd.explain(model).enabled
        return list(model.parameters())

    assert all(map(torch.equal, trained(fd.FastDecodeCallback()), trained()))


def test_wrapped_before_and_after(other):
    """DistributedDataParallel makes no difference, before or after `enable`."""
    expected = outputs(other)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        unused = {"find_unused_parameters": True}  # of a pooler
        wrapper = nn.parallel.DistributedDataParallel(fd.enable(other), **unused)
        assert fd.explain(wrapper).enabled
        assert torch.equal(wrapper(IDS, attention_mask=MASK)[0], expected[0])
        fd.disable(wrapper)
        assert not fd.explain(other).enabled
        fd.enable(wrapper)
        assert torch.equal(wrapper(IDS, attention_mask=MASK)[0], expected[0])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["pretrained_model", "model", "backbone"])
@pytest.mark.parametrize(
    "wrap", [lambda critic: critic, nn.DataParallel, torch.compile], ids=["", "parallel", "compile"]
)
def test_a_module_that_holds_a_model(name, wrap):
    for model in (tiny_model(), made("decoder")):
        critic = wrap(Critic(**{name: model}))
        assert fd.enable(critic) is critic
        assert fd.explain(model).enabled
        assert str(fd.explain(critic)) == str(fd.explain(model))
        fd.disable(critic)
        assert not fd.explain(model).enabled


def test_a_module_that_holds_several_models_is_told_what_to_pass():
    actor, reference = tiny_model(), tiny_model()
    with pytest.raises(TypeError, match="got Critic; pass its attribute 'actor' or 'reference'"):
        fd.enable(Critic(actor=actor, reference=reference))
    critic = Critic(body=actor.model, actor=actor)  # one of which is a part of the other
    assert fd.explain(fd.enable(critic)).model == "LlamaForCausalLM"
    fd.disable(critic)
    vars(critic)["again"] = actor  # not a module of it
    assert fd.explain(critic).model == "LlamaForCausalLM"


def test_a_model_and_the_decoder_in_it():
    """Both enabled, calls of the model share as before; each is disabled by itself."""
    model = fd.enable(tiny_model())
    fd.enable(model.model)
    model.generate(**PROMPT, **SAMPLING)
    assert fd.explain(model).last_call.path == "shared"
    fd.disable(model.model)
    assert fd.explain(model).enabled
    model.generate(**PROMPT, **SAMPLING)
    assert fd.explain(model).last_call.path == "shared"
