"""The committed table of architectures, and that the comparison behind it can fail."""

import re

import pytest
import transformers

from hf_fastdecode._compat import CACHE
from hf_fastdecode.cache.storage import TokenStorage

from ..test_readme import README
from ..tiny_models import ARCHITECTURES
from . import compare
from .classes import generating_classes
from .compare import verdict_on
from .page import PAGE, listed, read, version, written

CLASSES = [
    "LlamaForCausalLM",
    "DoryForCausalLM",  # caches each of its loops apart
    "Qwen2MoeForCausalLM",
    "GptOssForCausalLM",
    "GotOcr2ForConditionalGeneration",  # passes logits_to_keep to its attention function
    "GraniteSpeech5ForCTC",  # names no num_hidden_layers
    "MllamaForCausalLM",
    "T5ForConditionalGeneration",
]
INDEXED = "indexed" if CACHE == "cache" else "deepseek_sparse"  # name of a type of layers before transformers 5.24


@pytest.mark.parametrize("name", CLASSES)
def test_the_page_says_what_the_comparison_finds(name):
    if name not in generating_classes():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    assert listed()[name] == verdict_on(name).kind


def test_images_that_layers_attend_to():
    name = "MllamaForConditionalGeneration"
    assert read()[name].inputs == verdict_on(name).inputs == "image"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DeepseekV32ForCausalLM", f"of type {INDEXED}_attention need more than keys and values of every token"),
        ("PaliGemmaForConditionalGeneration", "prepare_inputs_for_generation, are not those of the attention mask"),
        ("GitForCausalLM", "its steps count the tokens of an image before each prompt"),
        ("CpmAntForCausalLM", "does not use transformers' attention interface"),
        ("OpenAIGPTLMHeadModel", f"OpenAIGPTLMHeadModel.forward takes no {CACHE}"),
        ("VoxtralRealtimeForConditionalGeneration", "each of its steps adds another part of the sound"),
        ("GraniteSpeech5ForCTC", "generate of GraniteSpeech5ForCTC does not call that of transformers"),
    ],
)
def test_reasons_say_what_is_missing(name, reason):
    assert reason in verdict_on(name).reason


def test_rows_are_replaced_in_the_page():
    if version() != transformers.__version__:
        pytest.skip(f"the page is of transformers {version()}")
    page = PAGE.read_text()
    assert re.sub("with torch [^:]*:", "", written(read())) == re.sub("with torch [^:]*:", "", page)


def test_no_class_is_wrong():
    assert set(listed().values()) == {"shared", "stock", "not compared"}


def test_the_page_lists_every_class_of_its_transformers():
    if version() != transformers.__version__:
        pytest.skip(f"the page is of transformers {version()}")
    assert sorted(listed()) == sorted(generating_classes())


def test_the_readme_counts_what_the_page_lists():
    kinds = list(listed().values())
    shared, compared = kinds.count("shared"), len(kinds) - kinds.count("not compared")
    assert f"({shared} of the {compared} classes compared do)" in README


def test_the_page_shares_what_tests_run_on():
    rows = re.findall(r"^\| \w+ \| ([\w-]+) \|", PAGE.read_text().split("\n## Stock")[0], re.MULTILINE)
    assert {model_type for model_type, _ in ARCHITECTURES.values()} <= set(rows)


def test_other_keys_give_a_wrong_verdict(monkeypatch):
    write = TokenStorage.write_nodes

    def negated(self, spans, new):
        write(self, spans, new._replace(values=-new.values))

    monkeypatch.setattr(TokenStorage, "write_nodes", negated)
    verdict = verdict_on("LlamaForCausalLM")
    assert (verdict.kind, verdict.reason) == ("wrong", "greedy, shared")


def test_an_error_gives_a_crashed_verdict(monkeypatch):
    def fail(*args):
        raise AttributeError("no attribute 'numel'")

    monkeypatch.setattr(TokenStorage, "write_nodes", fail)
    verdict = verdict_on("LlamaForCausalLM")
    assert (verdict.kind, verdict.reason) == ("crashed", "AttributeError: no attribute 'numel'")


def test_tokens_without_a_context_give_a_blind_verdict(monkeypatch):
    """Where tokens do not depend on what is shared, no comparison would show anything."""
    monkeypatch.setattr(compare, "_spoilt", lambda cache: cache)
    assert verdict_on("LlamaForCausalLM").kind == "blind"
