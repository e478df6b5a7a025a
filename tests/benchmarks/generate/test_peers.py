"""`tests.clients.generate_peers` without vLLM, which a stand-in replaces: models, prompts, rows and refusals."""

import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.generate.cases import GenerateCase, PromptTree
from hf_fastdecode.errors import InputError
from hf_fastdecode.files import read_rows
from hf_fastdecode.measurement.rows import NotAvailableError
from hf_fastdecode.measurement.shapes import SHAPES, parameters
from tests.clients.generate_peers import ENVIRONMENT, columns, draw_weights, experts_of, main, mean_experts
from tests.clients.vllm_models import VLLM_SHAPES, VllmModel

LAYERS, EXPERTS = 2, 4  # of tiny-experts


class Vllm(SimpleNamespace):
    """A module with the parts of vLLM that are called; `made` are the arguments of its engines."""

    def __init__(self):
        super().__init__(__version__="0.0", SamplingParams=SimpleNamespace, made=[], seen=[], LLM=self.engine)
        self.loader, self.model = type("DummyModelLoader", (), {}), torch.nn.Linear(64, 64)

    def engine(self, model, **arguments):
        with open(f"{model}/config.json") as file:
            self.made.append(arguments | {"config": json.load(file)})
        graphs = SimpleNamespace(mode=3, cudagraph_mode=SimpleNamespace(name="FULL"))
        scheduler = SimpleNamespace(async_scheduling=True)
        config = SimpleNamespace(compilation_config=graphs, scheduler_config=scheduler, use_v2_model_runner=False)
        engine = SimpleNamespace(vllm_config=config)
        self.loader.load_weights(self.loader(), self.model, None)
        return SimpleNamespace(generate=self.generate, llm_engine=engine)

    def generate(self, inputs, sampling, use_tqdm):
        self.seen += [tuple(one["prompt_token_ids"]) for one in inputs]
        new = sampling.max_tokens
        chosen = np.arange(new * LAYERS * 2).reshape(new, LAYERS, 2) % EXPERTS
        rows = [SimpleNamespace(token_ids=[5] * new, routed_experts=chosen) for _ in range(sampling.n)]
        return [SimpleNamespace(prompt_token_ids=one["prompt_token_ids"], outputs=rows) for one in inputs]


@pytest.fixture
def vllm(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "vllm", Vllm())
    loaders = SimpleNamespace(DummyModelLoader=sys.modules["vllm"].loader)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.dummy_loader", loaders)
    return sys.modules["vllm"]


def test_rows_of_a_shape(vllm, tmp_path):
    out = tmp_path / "rows.csv"
    main(out, "tiny", ["16x4"], ["4+3x8x2"], new_tokens=6, repeats=2, kv_gib=0.5)
    (made,) = vllm.made
    assert (made["max_model_len"], made["kv_cache_memory_bytes"], made["enforce_eager"]) == (22, 2**29, False)
    assert made["config"]["architectures"] == ["LlamaForCausalLM"]
    assert vllm.model.weight.std().item() == pytest.approx(0.02, rel=0.1)
    rows = read_rows(out)
    assert [(row["shape"], row["context"], row["samples"]) for row in rows] == [
        ("tiny", "16", "4"),
        ("tiny tree 4+3x8x2", "12", "6"),
    ]
    for row in rows:
        assert (row["way"], row["status"], row["steps"], row["dtype"]) == ("vllm", "ok", "5", "bfloat16")
        assert row["ran"] == "vLLM 0.0, V1 model runner, torch.compile mode 3, CUDA graphs FULL, async scheduling"
        assert float(row["total_s"]) > 0
    assert len(set(vllm.seen)) == len(vllm.seen) == (1 + 1 + 2 + 2) * (1 + 3)
    tree = [prompt for prompt in vllm.seen if len(prompt) == 12]
    assert [len({prompt[:4] for prompt in tree[at : at + 3]}) for at in range(0, len(tree), 3)] == [1] * 6


def test_experts_are_added_to_rows(vllm, tmp_path):
    out = tmp_path / "rows.csv"
    with pytest.raises(InputError, match=r"has no row of .*'tiny-experts'.*; measure it first"):
        main(out, "tiny-experts", ["16x4"], new_tokens=6, repeats=1, count_experts=True)
    main(out, "tiny-experts", ["16x4"], new_tokens=6, repeats=1)
    (before,) = read_rows(out)
    main(out, "tiny-experts", ["16x4"], new_tokens=6, repeats=1, count_experts=True)
    (row,) = read_rows(out)
    assert row == before | {"experts": "2.0", "of_experts": str(EXPERTS)}
    assert vllm.made[-1]["enforce_eager"] and vllm.made[-1]["enable_return_routed_experts"]


def test_measures_once_a_file_exists(vllm, tmp_path, monkeypatch):
    out, go = tmp_path / "rows.csv", tmp_path / "go"

    def sleep(seconds):
        assert len(vllm.made) == 1 and not vllm.seen
        go.touch()

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(sys, "argv", ["peers", "--wait", str(go), "--shape", "tiny", "--out", str(out)])
    main(out, "tiny", ["16x4"], new_tokens=6, repeats=1, wait=go)
    (row,) = read_rows(out)
    assert row["command"].endswith(" --shape tiny")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": "whisper-large-v3", "point": ["1500x4"]}, "shape"),
        ({"shape": "tiny"}, "name a --point or a --tree"),
        ({"shape": "tiny", "point": ["16"]}, "a point is CONTEXTxN"),
        ({"shape": "tiny", "point": ["16x4"], "count_experts": True}, "which tiny is not"),
        ({"shape": "gemma3-12b-image", "point": ["358x4"], "count_experts": True}, "which gemma3-12b-image is not"),
        ({"shape": "gemma3-12b-image", "point": ["100x4"]}, "takes 256 tokens"),
    ],
)
def test_refusals(vllm, tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        main(tmp_path / "rows.csv", **arguments)
    assert not vllm.made


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm(tmp_path):
    with pytest.raises(NotAvailableError, match="vllm cannot be imported"):
        main(tmp_path / "rows.csv", "tiny", ["16x4"])


def test_rows_that_are_not_those_asked_for(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "SamplingParams", lambda n, **more: SimpleNamespace(n=n - 1, **more))
    main(tmp_path / "rows.csv", "tiny", ["16x4"], repeats=1)
    (row,) = read_rows(tmp_path / "rows.csv")
    assert row["status"].startswith("failed: RuntimeError: vLLM drew other rows")


def test_columns():
    found = columns(GenerateCase("tiny", 16, 4, 11), 3.0, [0.5, 0.4, 0.6], [2.5, 1.5, 3.5])
    assert found == {
        **{"ms_per_step_p20": 100.0, "ms_per_step": 200.0, "ms_per_step_p80": 300.0, "tokens_per_s": 20.0},
        **{"prefill_s": 0.5, "total_s": 2.5, "first_call_s": 3.0, "steps": 10},
    }


def test_mean_experts():
    chosen = np.zeros((2, 3, 2, 2), np.uint8)  # rows, steps, layers: the first without experts
    chosen[:, :, 1] = [[[0, 1], [0, 1], [2, 3]], [[0, 1], [1, 2], [0, 1]]]
    assert mean_experts(chosen, 1) == (2 + 3 + 4) / 3
    with pytest.raises(RuntimeError, match="of 1 layers, and 2 have some"):
        mean_experts(chosen, 2)


@pytest.mark.parametrize("shape", [shape for shape in VLLM_SHAPES if shape in SHAPES])
def test_models_have_the_weights_of_ours(shape, tmp_path):
    model = VllmModel(shape)
    model.write(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(config)
    assert type(found).__name__ == model.config.architectures[0]
    assert sum(one.numel() for one in found.parameters()) == parameters(shape)


def test_fields_that_only_vllm_reads(tmp_path):
    VllmModel("nemotron-h-8b").write(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["hybrid_override_pattern"] == SHAPES["nemotron-h-8b"]["hybrid_override_pattern"]
    assert experts_of("nemotron-h-8b") == []


def test_drawn_weights_leave_norms():
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    draw_weights(layer, 0.02)
    assert layer[0].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert (layer[1].weight == 1).all() and not layer[0].bias.any()


@pytest.mark.parametrize("shape", ["tiny-qwen3-vl", "tiny-gemma3-image"])
def test_prompts_with_images(shape):
    model, draw = VllmModel(shape), np.random.default_rng(0)
    found = model.prompts(PromptTree(16, 3, 104, 2).case(shape, 4), draw)
    images = model.images
    prompts = [one["prompt_token_ids"] for one in found]
    assert {len(one) - len(images.ids) + images.tokens for one in prompts} == {120}
    assert all(one[16 : 16 + len(images.ids)] == images.ids for one in prompts)
    assert not {*images.names} & {token for one in prompts for token in one[:16] + one[16 + len(images.ids) :]}
    assert len({tuple(one[:16]) for one in prompts}) == 1 and len({tuple(one) for one in prompts}) == 3
    pixels = {one["multi_modal_data"]["image"].tobytes() for one in found}
    assert len(pixels) == 3
    tokenizer = images.tokenizer(512)
    assert tokenizer.convert_tokens_to_ids(list(images.names.values())) == list(images.names)
    assert len(tokenizer) == 512
