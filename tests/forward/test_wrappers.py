"""What is around a pass and its layers: checkpoints, replicas and transformations of PyTorch, caches and copies."""

import copy
import gc
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.errors import Unsupported
from hf_fastdecode.forward import seam
from hf_fastdecode.forward.packed import to_rows
from hf_fastdecode.generation.structure import Structure

from ..tiny_models import tiny_model
from .comparison import exact, faults, report_of, sharing
from .passes import CALL, REAL, ROWS, check_stock, outputs

IDS = ROWS["input_ids"]


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("kind", CheckpointImpl)
def test_checkpoint_wrappers_recompute_layers_in_the_pass(kind, use_cache):
    """As FSDP's activation checkpointing puts them around layers."""
    model = tiny_model().train()
    stock, oracle = outputs(model), exact(model, outputs)
    model.enable_input_require_grads()
    layer = type(model.model.layers[0])
    wrap = partial(checkpoint_wrapper, checkpoint_impl=kind)
    apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, layer)
    )
    with sharing(model):
        ours = outputs(model, CALL | {"use_cache": use_cache})
        assert report_of(model).path == "shared"
    assert not faults(
        {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in ours.items()}, stock, oracle
    )
    assert model.model.layers[0].checkpoint_fn.func is torch.utils.checkpoint.checkpoint


def test_composable_checkpoints():
    model = tiny_model().train()
    for layer in model.model.layers:
        checkpoint(layer)
    check_stock(model, "is checkpointed by torch.distributed._composable")
    with sharing(model), torch.no_grad():
        model(**CALL)
        assert report_of(model).path == "shared"


def test_replicas_of_data_parallel_run_their_own_parts():
    """As a replica on a second GPU: its weights are others than those of the model that it is copied from."""
    model = tiny_model()
    other = copy.deepcopy(model.model.norm)
    torch.nn.init.zeros_(other.weight)
    with sharing(model):
        for part in (model, model.model):
            replica = part._replicate_for_data_parallel()
            decoder = replica.model = model.model._replicate_for_data_parallel() if part is model else replica
            decoder.norm = other
            with torch.no_grad():
                assert not replica(**CALL)[0].any()
        assert report_of(model) is None
        model(**CALL)
        assert report_of(model).path == "shared"


def test_order_of_outputs():
    model = tiny_model()
    given = CALL | {"output_hidden_states": True, "use_cache": True}
    stock = model.model(**given)
    with sharing(model):
        ours, values = model.model(**given), model.model(**given, return_dict=False)
        assert report_of(model).path == "shared"
    assert [*ours] == [*stock]
    assert list(map(type, values)) == [torch.Tensor, type(ours[CACHE]), tuple]


def test_caches_are_filled_by_what_reads_them():
    """Not by code that looks for tensors, as accelerate does; copies are filled, and hold neither pass nor model."""
    model = tiny_model()
    with sharing(model), torch.no_grad():
        cache = model(input_ids=IDS, use_cache=True)[CACHE]
    assert not hasattr(cache, "dtype")
    assert "layers" not in vars(cache)
    twin = copy.copy(cache)
    assert vars(twin).keys() == vars(cache).keys() >= {"layers"}
    assert not any(name.startswith("_") for name in vars(cache))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces_are_of_stock():
    model, others = tiny_model().requires_grad_(False), IDS.flip(1)

    def run(ids):
        return model(ids, use_cache=False, return_dict=False)[0]

    with sharing(model), torch.no_grad():
        traced = torch.jit.trace(run, IDS, check_trace=False)
    torch.testing.assert_close(traced(others), run(others))


def test_transformed_passes_are_stock():
    model = tiny_model()
    weights = {name: one.detach() for name, one in model.named_parameters()}

    def loss(weights):
        return torch.func.functional_call(model, weights, kwargs=CALL).logits.square().mean()

    stock = torch.func.grad(loss)(weights)
    with sharing(model):
        ours = torch.func.grad(loss)(weights)
    assert all(torch.equal(ours[name], stock[name]) for name in stock)


def test_fake_tokens():
    model = tiny_model()
    with sharing(model), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(IDS), use_cache=False).logits.shape == (*IDS.shape, model.config.vocab_size)
        assert "cannot be read" in report_of(model).reason


def test_embeddings_under_another_default_device():
    """Their hashes are made on the host."""
    model = tiny_model()

    def run(model):
        given = {"inputs_embeds": model.get_input_embeddings()(IDS).detach()}
        with torch.device("meta"):
            return model(attention_mask=CALL["attention_mask"], use_cache=False, **given).logits[REAL]

    with sharing(model):
        found = run(model)
        assert report_of(model).path == "shared"
    torch.testing.assert_close(found, model(**CALL).logits[REAL])


def test_attention_of_pytorch_that_is_replaced(monkeypatch):
    """As by PyTorch's context parallelism, in which a process has only a part of each row."""
    own = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *given, **options: own(*given, **options))
    check_stock(tiny_model(), "scaled_dot_product_attention is replaced")


def test_a_decoder_enabled_before_its_model_is_reported_by_both():
    model = tiny_model()
    fd.enable(model.model, min_saved_tokens=1)
    fd.enable(model, min_saved_tokens=1)
    model(**CALL)
    assert report_of(model) is report_of(model.model) is not None
    fd.disable(model)
    assert fd.explain(model.model).enabled


def test_a_copy_of_the_decoder_does_not_copy_the_model():
    model = tiny_model()
    model.forward = types.MethodType(lambda self, *given, **named: type(self).forward(self, *given, **named), model)
    fd.enable(model)
    gc.collect()
    before = [one for one in gc.get_objects() if type(one) is type(model)]
    twin = copy.deepcopy(model.model)
    gc.collect()
    assert twin is not model.model
    assert len([one for one in gc.get_objects() if type(one) is type(model)]) == len(before)
    whole = copy.deepcopy(model)
    fd.disable(whole)
    assert not fd.explain(whole.model).enabled
    assert fd.explain(model.model).enabled


def test_gradients_of_tokens_in_half_precision_are_rounded_once():
    hidden = torch.zeros(1, 1, 8, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(256, 1, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    to_rows(hidden, torch.zeros(256, 1, dtype=torch.int64)).backward(grad)
    torch.testing.assert_close(hidden.grad[0, 0], grad.float().sum((0, 1)).bfloat16(), rtol=0.008, atol=0)


def test_output_that_is_refused_does_not_run_layers_again_where_others_wait(monkeypatch):
    """Processes that gather weights in each layer would wait for each other."""
    monkeypatch.setattr(Structure, "gathering", property(lambda structure: "other processes"))
    monkeypatch.setattr(seam, "_check_output", refuse)
    model = tiny_model()
    with sharing(model), pytest.raises(ValueError, match="share_forward=False"):
        model(**CALL)


def refuse(*_):
    raise Unsupported("its output has more")
