"""Kernels that cannot be compiled or launched: another takes their place, once and with one line in the log."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

import hf_fastdecode as fd
from hf_fastdecode.cache import handles
from hf_fastdecode.generation.decoding.sampling import choose_sampler
from hf_fastdecode.generation.steps import modes
from hf_fastdecode.generation.steps.captured_step import CapturedStep
from hf_fastdecode.kernels import failures
from hf_fastdecode.kernels.failures import Kernel, KernelFailedError, failure, launching

from ..tiny_models import ragged_prompts, seeded, tiny_model

pytest.importorskip("triton")
from hf_fastdecode.kernels.forest_decode import api, config
from hf_fastdecode.kernels.forest_decode.api import Config
from hf_fastdecode.kernels.sampling import api as sampling

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted, in float32")


class Broken:
    """A kernel whose launches raise after the first few."""

    def __init__(self, kernel, after=0):
        self.kernel, self.after, self.launches = kernel, after, 0

    def __getitem__(self, grid):
        self.launches += 1
        if self.launches > self.after:
            raise AttributeError("no _reinterpret")
        return self.kernel[grid]


@pytest.fixture(autouse=True)
def none_failed(monkeypatch):
    monkeypatch.setattr(failures, "_failures", {})


@pytest.fixture
def by_kernels(monkeypatch):
    """Let ``backend="auto"`` and captured modes take the kernels where they are interpreted."""
    monkeypatch.setattr(handles, "_CHOOSES_ON", {"cpu", "cuda"})
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    capture = CapturedStep.capture

    def capture_and_run(self):
        capture(self)
        self._graph.replay()  # as on a GPU, where it compiles the kernels

    monkeypatch.setattr(CapturedStep, "capture", capture_and_run)


def broken(monkeypatch, module, name, **options):
    kernel = Broken(getattr(module, name), **options)
    monkeypatch.setattr(module, name, kernel)
    return kernel


def tokens(model):
    call = ragged_prompts(65) | {"num_return_sequences": 2, "max_new_tokens": 3}
    return seeded(lambda: model.generate(**call, do_sample=True, top_k=0))


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize(("module", "name"), [(api, "node_partials"), (api, "attend_suffixes")])
@pytest.mark.parametrize(("mode", "after"), [("eager", 0), ("eager", 3), ("captured", 1)])
def test_pytorch_takes_the_place_of_the_kernels(mode, after, module, name, monkeypatch, caplog):
    """Also in the middle of a step, when the kernels of other layers have appended to their suffixes: two layers
    launch each kernel twice in a step."""
    monkeypatch.setattr(modes, "_STEPS_THAT_PAY_A_CAPTURE", 0 if mode == "captured" else 10**9)
    model = tiny_model("llama-gqa")
    stock = tokens(model)
    kernel = broken(monkeypatch, module, name, after=after)
    with fd.enabled(model):
        assert torch.equal(tokens(model), stock)
        assert torch.equal(tokens(model), stock)
        assert kernel.launches == after + 1, "what failed was tried again"
        layers = fd.explain(model).last_call.layers
        assert all("suffixes by cpu" in did and "; the decode kernels cannot run on cpu" in did for did in layers)
    (told,) = (line for line in caplog.messages if line.startswith("the decode kernels"))
    reason = "the decode kernels cannot run on cpu: AttributeError: no _reinterpret"
    assert told == f"{reason}; where it is not forced, PyTorch's operators will be used instead"
    assert failure(Kernel.FOREST, CPU) == reason


def test_a_forced_backend_raises(monkeypatch):
    model = tiny_model("llama-gqa")
    broken(monkeypatch, api, "attend_suffixes")
    message = "backend='triton' cannot run: the decode kernels cannot .*reinterpret; use backend='auto' or 'plain'"
    for _ in range(2):
        with fd.enabled(model, backend="triton"), pytest.raises(ValueError, match=message):
            tokens(model)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_portable_kernel_takes_the_place_of_hoppers(mode, monkeypatch, caplog):
    def choose_config(*args, **options):
        hopper = failure(Kernel.HOPPER, CPU) is None
        return Config(128 if hopper else 16, overlap=False, hopper=hopper)

    model = tiny_model("llama-gqa")
    stock = tokens(model)
    monkeypatch.setattr(api, "choose_config", choose_config)
    monkeypatch.setitem(sys.modules, "hf_fastdecode.kernels.forest_decode.hopper", None)  # importing it raises
    with fd.enabled(model, mode=mode, backend="triton"):
        assert torch.equal(tokens(model), stock)
        assert torch.equal(tokens(model), stock)
        assert all("by triton" in did for did in fd.explain(model).last_call.layers)
    (told,) = (line for line in caplog.messages if " cannot run on " in line)
    assert told.startswith("the kernel for Hopper GPUs cannot run on cpu: ModuleNotFoundError: import of")
    assert told.endswith("where it is not forced, the portable kernel will be used instead")
    assert failure(Kernel.FOREST, CPU) is None


def test_hoppers_kernel_is_not_chosen_where_it_failed(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(config, "interpreted", lambda: False)
    monkeypatch.setattr(config, "compute_capability", lambda _: (9, 0))
    assert config.choose_config(1024, 128, overlap=True, device=device).hopper
    with pytest.raises(KernelFailedError), launching(Kernel.HOPPER, device):
        raise NotImplementedError
    assert not config.choose_config(1024, 128, overlap=True, device=device).hopper
    assert config.choose_config(1024, 128, overlap=True, device=torch.device("cuda", 1)).hopper


def test_transformers_draws_where_the_sampling_kernel_cannot(monkeypatch, caplog):
    kernel = broken(monkeypatch, sampling, "sample_rows")
    prompts, logits = torch.zeros(3, 5, dtype=torch.int64), torch.randn(3, 77).bfloat16()
    settings = GenerationConfig(do_sample=True)
    state = torch.random.get_rng_state()
    for _ in range(2):
        sampler, reason = choose_sampler(
            "auto", LogitsProcessorList(), settings, prompts, logits, computed_in=logits.dtype
        )
        assert sampler.name == "hf"
        assert reason == "the sampling kernel cannot run on cpu: AttributeError: no _reinterpret"
    assert torch.equal(torch.random.get_rng_state(), state), "draws are no longer stock's for the same seed"
    assert kernel.launches == 1
    assert caplog.messages == [f"{reason}; where it is not forced, transformers' sampler will be used instead"]
    with pytest.raises(ValueError, match="sampler='fast' cannot draw these tokens: the sampling kernel cannot run"):
        choose_sampler("fast", LogitsProcessorList(), settings, prompts, logits, computed_in=logits.dtype)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("Triton Error [CUDA]: out of memory")])
def test_no_memory_is_no_failure_of_a_kernel(error):
    """Fewer rows may have room for what it needs: the decoding loop goes on in smaller waves."""
    with pytest.raises(torch.OutOfMemoryError), launching(Kernel.FOREST, CPU):
        raise error
    assert failure(Kernel.FOREST, CPU) is None


def test_the_reason_is_what_first_went_wrong():
    error = RuntimeError("at 12:4:\n    the kernel's source")
    error.__cause__ = AttributeError("no such name\nin a second line")
    with pytest.raises(KernelFailedError, match=r"cpu: AttributeError: no such name$"), launching(Kernel.FOREST, CPU):
        raise error


def test_triton_is_used_by_its_public_names():
    """Private names come and go with Triton's versions."""
    for path in Path(failures.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                assert not node.attr.startswith("_") or node.attr.startswith("__"), f"{path.name}: {node.attr}"
