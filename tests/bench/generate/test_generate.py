"""Whole calls of generate on the CPU, tiny: what a row holds, what is refused, and attention that is replaced."""

import math
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch
from transformers import cache_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.attention.active_passes import ATTENTION_NAME
from hf_fastdecode.attention.interface import shared_context_attention
from hf_fastdecode.bench.generate import measure as generate
from hf_fastdecode.bench.generate import replaced_attention as replacing
from hf_fastdecode.bench.generate import ways as generate_ways
from hf_fastdecode.bench.generate.calls import caller, load
from hf_fastdecode.bench.generate.cases import WAYS, GenerateCase, PromptTree
from hf_fastdecode.bench.generate.check import check_way, logits_error
from hf_fastdecode.bench.generate.inputs.shapes import given_of
from hf_fastdecode.bench.generate.measure import GenerateBench
from hf_fastdecode.bench.generate.replaced_attention import no_attention, replaced_attention
from hf_fastdecode.bench.generate.ways import find_way, using
from hf_fastdecode.generation.decoding.stopping import RowLengthCriteria
from hf_fastdecode.measurement.runner import NotAvailableError
from hf_fastdecode.measurement.shapes import SHAPES, parameters, random_model

CPU = torch.device("cpu")
CASE = GenerateCase("tiny", 120, 4, 8, "float32")
PER_TOKEN = 2 * 2 * 2 * 32 * 4  # K and V, layers, KV heads, head_dim, bytes


@pytest.fixture(scope="module")
def bench():
    return GenerateBench(CPU, repeats=1)


@pytest.fixture
def model():
    return random_model("tiny", CPU, torch.float32)


def test_stock_and_shared(bench):
    stock, shared = (bench.measure(CASE, way) for way in ("stock", "shared"))
    assert stock["status"] == shared["status"] == "ok"
    assert stock["embedded_tokens"] == 4 * (120 + 7)
    assert shared["embedded_tokens"] == 120 + 4 * 7
    assert shared["kv_bytes"] == shared["floor_kv_bytes"] == (120 + 4 * 8) * PER_TOKEN
    assert stock["kv_bytes"] == 4 * (120 + 7) * PER_TOKEN
    assert shared["total_s"] > shared["prefill_s"] > 0
    assert shared["first_call_s"] > 0
    assert shared["tokens_per_s"] == pytest.approx(4e3 / shared["ms_per_step"])
    assert (stock["ran"], shared["ran"], shared["steps"]) == (None, "eager, sampler hf", 7)
    assert list(stock) == list(shared)


@pytest.mark.parametrize("way", ["stock-static", "eager", "eager-bifurcated", "eager-hydragen", "eager+sampler=hf"])
def test_other_ways(bench, way):
    row = bench.measure(CASE, way)
    assert row["status"] == "ok"
    assert math.isfinite(row["ms_per_step"])


def test_the_ceiling_has_steps_only(bench):
    row = bench.measure(CASE, "eager-no-attention")
    assert row["status"] == "ok"
    assert math.isfinite(row["ms_per_step"])
    assert row["prefill_s"] is row["total_s"] is row["kv_bytes"] is None


def test_what_cannot_run_here_says_why(bench):
    fresh = GenerateBench(torch.device("cpu"))
    for mode in ("graph", "compile"):
        for way in (mode, f"{mode}-no-attention"):
            assert fresh.measure(CASE, way)["status"] == f"not run: mode={mode!r} needs a CUDA device, got cpu"
    assert fresh._model.held is None  # which may have taken gigabytes
    with pytest.raises(ValueError, match=r"an option of a way is one of .*, got 'nosuch' in 'shared\+nosuch=1'"):
        bench.measure(CASE, "shared+nosuch=1")


def test_a_call_that_ran_stock_is_not_measured_as_ours(bench):
    row = bench.measure(replace(CASE, samples=1), "shared")
    assert row["status"].startswith("not run: it ran stock: sharing would save 0 tokens")
    assert row["ms_per_step"] is None


def test_wrong_tokens_are_not_measured(monkeypatch):
    monkeypatch.setitem(replacing.REPLACEMENTS, "hydragen", no_attention)
    row = GenerateBench(CPU, repeats=1).measure(CASE, "eager-hydragen")
    assert row["status"] == "wrong: other tokens than stock in fp32 on cpu"
    assert row["ms_per_step"] is None
    assert GenerateBench(CPU, repeats=1, check=False).measure(CASE, "eager-hydragen")["status"] == "ok"


def test_wrong_tokens_of_the_case_itself_are_not_measured(monkeypatch):
    bench = GenerateBench(CPU, repeats=1)
    monkeypatch.setattr(generate, "check_way", lambda *arguments: None)
    monkeypatch.setitem(replacing.REPLACEMENTS, "hydragen", no_attention)
    row = bench.measure(CASE, "eager-hydragen")
    assert row["status"] == "wrong: other tokens than stock in this very case"
    assert row["ms_per_step"] is None


def test_logits_in_half_precision(monkeypatch):
    assert 0 < logits_error(find_way("eager"), CPU, torch.bfloat16) <= 2
    monkeypatch.setattr("hf_fastdecode.bench.generate.check.gives_stock_tokens", lambda *arguments: True)
    monkeypatch.setitem(replacing.REPLACEMENTS, "hydragen", no_attention)
    assert check_way(find_way("eager-hydragen"), CPU, torch.bfloat16).startswith("wrong: logits err ")


def test_slow_calls_run_as_often_as_their_times_need(monkeypatch):
    ran = []
    monkeypatch.setattr(
        generate, "caller", lambda *args: lambda count, **more: ran.append(count) or made(count, **more)
    )
    model = random_model("tiny", CPU, torch.float32)
    made = caller(model, CASE, find_way("shared"))
    slow = GenerateBench(CPU, repeats=1, check=False, budget_s=0.0001)
    monkeypatch.setattr(slow._model, "of", lambda *args: model)
    row = slow.measure(CASE, "shared")
    assert row["status"] == "ok"
    assert row["kv_bytes"] == row["floor_kv_bytes"] - 4 * PER_TOKEN  # by the report: but for the last tokens
    assert ran == [8, 1, 8, 1, 1]  # first, to the first token, whole; of one sample


def test_the_check_is_of_attention_whoever_draws():
    assert check_way(find_way("eager+sampler=fast"), CPU, torch.float32) is None


def test_out_of_memory_and_errors_are_results(bench, monkeypatch):
    def fail(error):
        def call(*arguments, **options):
            raise error

        return call

    model = bench._model.of(CASE, find_way("stock"))
    monkeypatch.setattr(model, "generate", fail(torch.OutOfMemoryError("on purpose")))
    assert bench.measure(CASE, "stock")["status"] == "out of memory"
    monkeypatch.setattr(model, "generate", fail(RuntimeError("on purpose")))
    row = bench.measure(CASE, "shared")
    assert row["status"] == "failed: RuntimeError: on purpose"
    monkeypatch.setattr(model, "generate", fail(ValueError("num_beams is wrong")))
    assert bench.measure(CASE, "shared")["status"] == "failed: ValueError: num_beams is wrong"
    assert not fd.explain(model).enabled


def test_a_model_that_does_not_load_is_a_result(tmp_path):
    row = GenerateBench(CPU, check=False).measure(replace(CASE, shape=str(tmp_path)), "stock")
    assert row["status"].startswith("failed: ")


def test_every_way_is_known():
    for name in WAYS:
        assert find_way(name).exact != (name.endswith("-no-attention") or name.startswith("quantized-"))
    with pytest.raises(ValueError, match=r"a way is one of stock, .*, got 'fast'"):
        find_way("fast")
    with pytest.raises(ValueError, match=r"options are written NAME=VALUE behind one of ours.*got 'stock\+a=1'"):
        find_way("stock+a=1")
    assert find_way("slim-k+r+sampler=hf") == replace(find_way("slim-k+r"), enable={"sampler": "hf"})
    assert find_way("slim-k+mode=compile").enable == {"mode": "compile"}
    with pytest.raises(ValueError, match=r"an option of a way is one of .*, got 'mode' in 'graph\+mode=eager'"):
        find_way("graph+mode=eager")
    with pytest.raises(
        ValueError, match=r"options are written NAME=VALUE behind one of ours.*got 'stock-slim-k\+r\+a=1'"
    ):
        find_way("stock-slim-k+r+a=1")
    assert find_way("graph+sampler=fast+min_shared_tokens=8").enable == {
        "mode": "graph",
        "sampler": "fast",
        "min_shared_tokens": 8,
    }


def test_attention_is_put_back(model):
    before = dict(vars(ALL_ATTENTION_FUNCTIONS)["_local_mapping"])

    def twice():
        with replaced_attention(no_attention):
            assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is not shared_context_attention
            with replaced_attention(no_attention):
                pass

    with pytest.raises(RuntimeError, match="replaced already"):
        twice()
    assert vars(ALL_ATTENTION_FUNCTIONS)["_local_mapping"] == before
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is shared_context_attention


def test_attention_that_was_not_replaced_is_noticed(model):
    with pytest.raises(NotAvailableError, match="not replaced"), using(model, find_way("eager-no-attention")):
        pass
    assert not fd.explain(model).enabled


def test_without_attention_tokens_differ(model):
    drawn = []
    for way in ("eager", "eager-no-attention"):
        torch.manual_seed(0)
        with using(model, find_way(way)):
            drawn.append(caller(model, CASE, find_way(way))(8))
    assert not torch.equal(*drawn)


# --- slim models and quantized caches --------------------------------------------------------------------------------


SLIM_CASE = replace(CASE, shape="tiny-mha")


@pytest.mark.parametrize(("plan", "width"), [("k", 128), ("k+r", 128 + 128 // 8)])
def test_slim_ways(bench, plan, width):
    stock, shared = (bench.measure(SLIM_CASE, way) for way in (f"stock-slim-{plan}", f"slim-{plan}"))
    assert stock["status"] == shared["status"] == "ok"
    assert math.isfinite(stock["ms_per_step"] + shared["ms_per_step"])
    assert shared["ran"] == "eager, sampler hf"
    assert stock["kv_bytes"] == 4 * (120 + 7) * 2 * width * 4  # rows, tokens, layers, numbers, bytes
    assert shared["kv_bytes"] == 120 * 2 * PER_TOKEN + 4 * 8 * 2 * width * 4  # the prompt as keys and values
    assert stock["floor_kv_bytes"] == shared["floor_kv_bytes"] == (120 + 4 * 8) * 2 * PER_TOKEN


def test_slim_models_are_as_converted_ones():
    model = load("tiny-mha", CPU, torch.bfloat16, "k+r")
    assert {(layer.plan, layer.rank, layer.float16) for layer in model.config.layer_plans} == {("k+r", 16, True)}
    with torch.no_grad():
        cache = model(torch.arange(3, 10)[None])[CACHE]
    assert [cache.layers[0].keys.dtype, cache.layers[0].values.shape[-1]] == [torch.float16, 16]


def test_wrong_slim_steps_are_not_measured(monkeypatch):
    monkeypatch.setattr("hf_fastdecode.patches.layers.shared_attention.merge", lambda suffix, nodes: nodes)
    row = GenerateBench(CPU, repeats=1).measure(SLIM_CASE, "slim-k")
    assert row["status"] == "wrong: other tokens than stock in fp32 on cpu"


@pytest.mark.parametrize("shape", ["tiny", "embedded"])
def test_slim_ways_need_a_named_multi_head_shape(shape):
    row = GenerateBench(CPU, check=False).measure(replace(CASE, shape=shape), "slim-k")
    assert row["status"].startswith("not run: slim ways need a named shape with as many KV heads as query heads")
    assert row["status"].endswith(f"got {shape}; choose 7b-mha, 13b-mha or tiny-mha")


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="transformers 5.23 brings it")
def test_quantized_caches(bench, model):
    row = bench.measure(CASE, "quantized-fp8")
    assert row["status"] == "ok"
    assert math.isfinite(row["ms_per_step"])
    assert row["kv_bytes"] is None  # transformers counts what is not quantized
    cache = caller(model, CASE, find_way("quantized-fp8"))(2, return_dict=True)[CACHE]
    assert type(cache).__name__ == "QuantizedCache"


def test_transformers_without_a_cache_in_fp8(bench, monkeypatch):
    monkeypatch.delattr(cache_utils, "Fp8QuantizedLayer", raising=False)
    row = bench.measure(CASE, "quantized-fp8")
    assert row["status"] == f"not run: transformers {version('transformers')} has no quantized cache in fp8; 5.23 has"


def test_calls_do_not_change_later_ones(model, monkeypatch):
    """transformers 5.17 takes the backend out of the configuration that it is given."""
    backends = []
    monkeypatch.setattr(model, "generate", lambda *_, cache_config, **__: backends.append(cache_config.pop("backend")))
    for _ in range(2):
        call = caller(model, CASE, find_way("quantized-hqq"))
        call(1), call(2)
    assert backends == ["hqq"] * 4


@pytest.mark.parametrize(("way", "package"), [("quantized-hqq", "hqq"), ("quantized-quanto", "optimum-quanto")])
def test_packages_that_are_not_installed(bench, monkeypatch, way, package):
    def absent(name):
        assert name == package
        raise PackageNotFoundError(name)

    monkeypatch.setattr(generate_ways, "version", absent)
    row = bench.measure(CASE, way)
    assert row["status"] == f"not run: {package} is not installed; pip install {package}"


# --- rows that finish one after another ------------------------------------------------------------------------------


def test_lengths_are_spread_evenly():
    for samples in (1, 2, 5, 16, 128):
        case = replace(CASE, samples=samples, new_tokens=64, finish="16-64")
        assert len(case.lengths()) == samples
        assert max(case.lengths()) == 64
        assert min(case.lengths()) == (16 if samples > 1 else 64)
    lengths = replace(CASE, samples=49, new_tokens=64, finish="16-64").lengths()
    assert sorted(lengths) == list(range(16, 65))
    assert lengths != sorted(lengths, reverse=True)
    assert CASE.lengths() == [8] * 4


@pytest.mark.parametrize("bounds", ["0-8", "3-9", "9-8"])
def test_impossible_lengths(bounds):
    with pytest.raises(ValueError, match=f"rows must finish between 1 and new_tokens = 8, got '{bounds}'"):
        replace(CASE, finish=bounds)


def test_each_row_ends_after_its_own_number_of_tokens():
    criterion = RowLengthCriteria(3, torch.tensor([1, 5, 2]))
    ids = torch.zeros(3, 5, dtype=torch.long)
    assert criterion(ids, None).tolist() == [True, False, True]
    assert criterion(ids[:, :4], None).tolist() == [True, False, False]


def test_lengths_of_a_mean_are_skewed():
    lengths = replace(CASE, samples=1000, new_tokens=800, finish="~100").lengths()
    assert (len(lengths), lengths[0], min(lengths)) == (1000, 800, 1)
    assert 98 < sum(lengths) / 1000 < 102
    assert sorted(lengths)[500] in (69, 70)  # log(2) times the mean
    assert replace(CASE, samples=1, new_tokens=64, finish="~5").lengths() == [64]
    with pytest.raises(ValueError, match="rows must finish between 1 and new_tokens = 8, got '~9'"):
        replace(CASE, finish="~9")


@pytest.mark.parametrize(
    ("way", "finish"), [("stock", "3-12"), ("shared", "3-12"), ("stock", "~4"), ("shared+max_rows=2", "~4")]
)
def test_rows_end_where_they_should(model, way, finish):
    case = replace(CASE, new_tokens=12, finish=finish)
    with using(model, find_way(way)):
        drawn = caller(model, case, find_way(way))(12)[:, 120:]
    assert drawn.shape == (4, 12)
    for row, length in zip(drawn, case.lengths(), strict=True):
        assert (row[length:] == 0).all()
        assert (row[:length] != 0).sum() >= length - 1


def test_rows_that_finish_are_counted(bench):
    case = replace(CASE, new_tokens=12, finish="3-12")
    row = bench.measure(case, "shared")
    assert row["status"] == "ok"
    drawn = sum(case.lengths()) - 4
    assert row["tokens_per_s"] == pytest.approx(drawn / (row["ms_per_step"] * 11e-3))


# --- prompts that share on two levels --------------------------------------------------------------------------------


TREE = PromptTree.parse("80+3x40x2")


def test_a_tree_is_a_case():
    case = TREE.case("tiny", 8, "float32")
    assert (case.context, case.samples, case.prompt_tokens) == (120, 6, 80 + 3 * 40)
    assert case.columns() == {**CASE.columns(), "samples": 6, "shape": "tiny tree 80+3x40x2"}
    assert PromptTree.of_row(case.columns()["shape"]) == TREE
    assert PromptTree.of_row("tiny") is None
    assert CASE.prompt_tokens == 120
    with pytest.raises(ValueError, match="rows of a tree run to the end, got finish='2-8' with 80"):
        replace(case, finish="2-8")


@pytest.mark.parametrize("text", ["2400", "2400+8x512", "2400x8x512x128", "0+8x512x128", "1+2x3x-4", "+8x512x128"])
def test_what_is_no_tree(text):
    with pytest.raises(ValueError, match=r"a tree is SHARED\+PROBLEMSxOWNxSAMPLES, such as 2400"):
        PromptTree.parse(text)


def test_prompts_of_a_tree_share_what_it_says(model):
    ids = given_of("tiny").arguments(model, TREE.case("tiny", 8))["input_ids"]
    assert ids.shape == (3, 120)
    assert (ids[:, :80] == ids[0, :80]).all()
    assert len(ids[:, 80].unique()) == 3


def test_one_level_stores_each_problem_whole(bench):
    case = TREE.case("tiny", 8, "float32")
    rows = {way: bench.measure(case, way) for way in ("stock", "eager", "eager+min_shared_tokens=81")}
    assert {row["status"] for row in rows.values()} == {"ok"}
    stored = [6 * 127, 80 + 3 * 40 + 6 * 8, 3 * 120 + 6 * 8]
    assert [row["kv_bytes"] for row in rows.values()] == [tokens * PER_TOKEN for tokens in stored]
    assert {row["floor_kv_bytes"] for row in rows.values()} == {stored[1] * PER_TOKEN}
    embedded = [6 * 127, 80 + 3 * 40 + 6 * 7, 3 * 120 + 6 * 7]
    assert [row["embedded_tokens"] for row in rows.values()] == embedded


def test_bifurcated_takes_one_prompt(bench):
    assert bench.measure(TREE.case("tiny", 8, "float32"), "eager-bifurcated")["status"].startswith("not run: ")


# --- models ----------------------------------------------------------------------------------------------------------


def test_models(tmp_path, model):
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = load(str(tmp_path / "checkpoint"), CPU, torch.float32)
    assert loaded.generation_config.eos_token_id is None
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    with pytest.raises(
        ValueError, match=r"shape must be one of 7b-mha, .*, deepseek-v2-lite, tiny, tiny-mha, tiny-8-heads, got '9b'"
    ):
        random_model("9b", CPU, torch.float32)


BILLIONS = {
    **{"7b-mha": 6.7, "7b-gqa": 7.2, "8b-gqa": 8.0, "8b-mqa": 7.8, "13b-mha": 13.0, "1b-gqa": 1.2, "qwen3-4b": 4.0},
    **{"mistral-7b": 7.2, "gemma2-9b": 9.2, "gemma3-12b": 11.8, "gpt-oss-20b": 20.9, "deepseek-v2-lite": 15.7},
    **{"qwen3.5-4b": 4.2, "nemotron-h-8b": 8.1, "falcon-7b": 6.9},
    **{"tiny": 0.0, "tiny-mha": 0.0, "tiny-8-heads": 0.0},
}


def test_sizes_of_shapes() -> None:
    """The published numbers of weights; Gemma 3's is of its text model."""
    assert {shape: round(parameters(shape) / 1e9, 1) for shape in SHAPES} == BILLIONS
