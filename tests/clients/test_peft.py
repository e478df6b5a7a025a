"""PEFT: adapters of an enabled base model, switched, merged and chosen for each row, give stock's tokens."""

from __future__ import annotations

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..tiny_models import ARCHITECTURES, VOCABULARY, ragged_prompts, seeded, tiny_model

PROMPTS = ragged_prompts(80, 73, shared=50)
SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 9}


_PROJECTIONS = {"target_modules": ["q_proj", "v_proj"]}
_VIRTUAL = {"num_virtual_tokens": 8}
_PADDED = "models count the padding of prompts"
_BRINGS_KEYS = "brings keys and values of its own"
_MIXES_TOKENS = "runs third-party code, peft.tuners"

# Every method of PEFT: arguments of its config beside `_PROJECTIONS` or in their place, and why calls run stock: with
# padded prompts, and with one prompt; None where they share.
METHODS: dict[str, tuple[dict, str | None, str | None]] = {
    "ADALORA": ({**_PROJECTIONS, "total_step": 10}, None, None),
    "ADAMSS": (_PROJECTIONS, _MIXES_TOKENS, _MIXES_TOKENS),
    "ADAPTION_PROMPT": ({"adapter_len": 4, "adapter_layers": 2}, None, None),
    "BEFT": (_PROJECTIONS, None, None),
    "BOFT": (_PROJECTIONS, None, None),
    "C3A": ({**_PROJECTIONS, "block_size": 16}, None, None),
    "CARTRIDGE": (_VIRTUAL, _BRINGS_KEYS, _BRINGS_KEYS),
    "CPT": ({"cpt_token_ids": [5, 6, 7, 8], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 2, 4]}, _PADDED, None),
    "DEFT": (_PROJECTIONS, None, None),
    "DELORA": (_PROJECTIONS, None, None),
    "FOURIERFT": (_PROJECTIONS, None, None),
    "FROD": (_PROJECTIONS, None, None),
    "GLORA": (_PROJECTIONS, None, None),
    "GRALORA": (_PROJECTIONS, None, None),
    "HIRA": (_PROJECTIONS, None, None),
    "HRA": (_PROJECTIONS, None, None),
    "IA3": ({"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}, None, None),
    "LILY": (_PROJECTIONS, _MIXES_TOKENS, _MIXES_TOKENS),  # its router averages over a row
    "LN_TUNING": ({"target_modules": ["input_layernorm"]}, None, None),
    "LOHA": (_PROJECTIONS, None, None),
    "LOKR": (_PROJECTIONS, None, None),
    "LORA": (_PROJECTIONS, None, None),
    "LORA, DoRA": ({**_PROJECTIONS, "use_dora": True}, None, None),
    "LORA, rsLoRA": ({**_PROJECTIONS, "use_rslora": True}, None, None),
    "MISS": (_PROJECTIONS, None, None),
    "MULTITASK_PROMPT_TUNING": ({**_VIRTUAL, "num_tasks": 2}, "'task_ids' is not accelerated", "'task_ids' is not"),
    "OFT": ({**_PROJECTIONS, "oft_block_size": 8, "r": 0}, None, None),
    "OSF": (_PROJECTIONS, None, None),
    "PEANUT": (_PROJECTIONS, None, None),
    "POLY": ({**_PROJECTIONS, "n_tasks": 2, "n_skills": 2}, "has a forward hook", "has a forward hook"),
    "PREFIX_TUNING": (_VIRTUAL, _BRINGS_KEYS, _BRINGS_KEYS),
    "PROMPT_TUNING": (_VIRTUAL, _PADDED, None),
    "PSOFT": (_PROJECTIONS, None, None),
    "PVERA": (_PROJECTIONS, None, None),
    "P_TUNING": ({**_VIRTUAL, "encoder_hidden_size": 32}, _PADDED, None),
    "RANDLORA": (_PROJECTIONS, None, None),
    "ROAD": ({**_PROJECTIONS, "group_size": 16}, None, None),
    "SHIRA": ({**_PROJECTIONS, "r": 4}, None, None),
    "SUPERTUNING": (_PROJECTIONS, None, None),
    "TINYLORA": (_PROJECTIONS, None, None),
    "TRAINABLE_TOKENS": ({"token_indices": [5, 6]}, None, None),
    "UNILORA": (_PROJECTIONS, None, None),
    "VBLORA": ({**_PROJECTIONS, "num_vectors": 8, "vector_length": 16}, None, None),
    "VERA": (_PROJECTIONS, None, None),
    "WAVEFT": ({**_PROJECTIONS, "n_frequency": 64}, None, None),
}
FAILS_WITHOUT_US = ("SHADOW",)  # in stock transformers too
NEEDS_ADAPTERS = ("XLORA",)  # saved ones: `test_a_mixture_of_adapters_runs_stock`


def test_the_table_knows_every_method_of_peft():
    known = {name.partition(",")[0] for name in METHODS} | {*FAILS_WITHOUT_US, *NEEDS_ADAPTERS}
    assert {kind.name for kind in peft.PeftType} == known


@pytest.mark.filterwarnings("ignore:::peft")
@pytest.mark.parametrize("name", METHODS)
def test_every_method(name):
    kind, (arguments, *reasons) = name.partition(",")[0], METHODS[name]
    if kind == "ADAMSS":
        pytest.importorskip("sklearn")
    torch.manual_seed(3)
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]](task_type="CAUSAL_LM", **arguments)
    adapted = peft.get_peft_model(tiny_model("llama-gqa"), config).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    one = {key: value[:1] for key, value in PROMPTS.items()}
    for prompts, reason, enabled in zip((PROMPTS, one), reasons, (adapted, adapted.get_base_model()), strict=True):
        rows = len(prompts["input_ids"])
        # One of each prompt, or of each row, as the method takes them.
        tasks = torch.arange(rows) if kind == "MULTITASK_PROMPT_TUNING" else torch.arange(3 * rows) % 2
        given = {"task_ids": tasks} if kind in ("MULTITASK_PROMPT_TUNING", "POLY") else {}
        greedy = {"do_sample": False, "top_k": None}
        beams, one_each = SAMPLING | greedy | {"num_beams": 3}, SAMPLING | greedy | {"num_return_sequences": 1}
        for call in (SAMPLING, beams, *([one_each] if rows > 1 and kind != "POLY" else [])):

            def run(prompts=prompts, call=call, given=given):
                return seeded(lambda: adapted.generate(**prompts, **call, **given))

            expected = run()
            with fd.enabled(enabled, min_saved_tokens=1):
                assert torch.equal(run(), expected)
                report = fd.explain(enabled).last_call
            if reason is None:
                assert report.path == "shared", report.reason
            else:
                assert report.path == "stock"
                assert reason in report.reason
        plain = seeded(lambda prompts=prompts: tiny_model("llama-gqa").generate(**prompts, **SAMPLING))
        assert not torch.equal(seeded(lambda p=prompts, g=given: adapted.generate(**p, **SAMPLING, **g)), plain)


@pytest.mark.filterwarnings("ignore:::peft")
def test_a_mixture_of_adapters_runs_stock(tmp_path):
    """X-LoRA weighs adapters by the hidden states of a whole row."""
    for name in ("first", "second"):
        lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **_PROJECTIONS)
        peft.get_peft_model(tiny_model("llama-gqa"), lora).save_pretrained(tmp_path / name)
    adapters = {str(number): str(tmp_path / name) for number, name in enumerate(("first", "second"))}
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=64, adapters=adapters)
    adapted = peft.get_peft_model(tiny_model("llama-gqa", use_cache=False), config).eval()  # it wants no cache
    expected, inner = generate(adapted), adapted.base_model.lora_model.model
    with fd.enabled(inner):
        assert torch.equal(generate(adapted), expected)
        assert not shared(inner)


@pytest.fixture
def model():
    """A model with two adapters that change its tokens; the first is active."""
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(tiny_model("llama-gqa"), config, adapter_name="first")
    adapted.add_adapter("second", config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return adapted.eval()


def generate(model, **arguments):
    return seeded(lambda: model.generate(**PROMPTS, **{**SAMPLING, **arguments}))


def shared(model) -> bool:
    return fd.explain(model).last_call.path == "shared"


def states(model):
    """The tokens of each state of the adapters, and whether each call was shared."""
    found, paths = {}, {}

    def note(name):
        found[name] = generate(model)
        report = fd.explain(model)
        paths[name] = report.last_call.path if report.last_call else "not enabled"

    note("first")
    model.set_adapter("second")
    note("second")
    with model.disable_adapter():
        note("none")
    model.set_adapter("first")
    note("first again")
    model.merge_adapter()
    note("merged")
    model.unmerge_adapter()
    note("unmerged")
    return found, paths


def test_tokens_follow_the_adapters(model):
    expected, _ = states(model)
    assert len({tuple(expected[name].flatten().tolist()) for name in ("first", "second", "none")}) == 3
    fd.enable(model)
    found, paths = states(model)
    assert set(paths.values()) == {"shared"}
    for name, tokens in expected.items():
        assert torch.equal(tokens, found[name]), name


def test_merged_and_unloaded_weights_are_shared(model):
    merged = model.merge_and_unload()
    expected = generate(merged)
    with fd.enabled(merged):
        assert torch.equal(generate(merged), expected)
        assert shared(merged)


@pytest.mark.parametrize("name", FAILS_WITHOUT_US)
def test_what_fails_without_us(name):
    """Should one of these begin to work, it belongs in the table."""
    config = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[name]](task_type="CAUSAL_LM", **_PROJECTIONS)
    adapted = peft.get_peft_model(tiny_model("llama-gqa"), config).eval()
    with pytest.raises(AttributeError, match="ShadowCarrier"):
        generate(adapted)


def test_the_base_model_is_what_is_enabled(model):
    expected = generate(model)
    fd.enable(model.get_base_model())
    assert torch.equal(generate(model), expected)
    assert shared(model)
    fd.disable(model)
    assert not fd.explain(model.get_base_model()).enabled


def test_a_model_enabled_before_its_adapter_shares_with_it():
    base = fd.enable(tiny_model("llama-gqa"))
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(base, config).eval()
    found = generate(adapted)
    assert shared(adapted)
    fd.disable(adapted)
    assert torch.equal(found, generate(adapted))


def test_an_adapter_for_each_row_runs_stock(model):
    prompts = {name: value.repeat_interleave(2, 0) for name, value in PROMPTS.items()}
    arguments = {"adapter_names": ["first", "second", "__base__", "first"], "max_new_tokens": 9, "do_sample": False}
    expected = model.generate(**prompts, **arguments)
    fd.enable(model)
    found = model.generate(**prompts, **arguments)
    assert torch.equal(found, expected)
    assert fd.explain(model).last_call.path == "stock"
    generate(model)  # the hooks have left with that call
    assert shared(model)


@pytest.mark.parametrize("change", ["set_adapter", "disable", "merge"])
def test_a_kept_cache_is_of_the_adapter_that_made_it(model, change):
    fd.enable(model)
    cache = fd.prefill(model, {name: value[:1] for name, value in PROMPTS.items()})
    prompt = {name: value[:1] for name, value in PROMPTS.items()}
    before = seeded(lambda: model.generate(**prompt, **SAMPLING, **{CACHE: cache}))
    if change == "set_adapter":
        model.set_adapter("second")
    elif change == "disable":
        model.base_model.disable_adapter_layers()
    else:
        model.merge_adapter()
    with pytest.raises(ValueError, match="prefill"):
        model.generate(**prompt, **SAMPLING, **{CACHE: cache})
    if change == "disable":
        model.base_model.enable_adapter_layers()
        assert torch.equal(before, seeded(lambda: model.generate(**prompt, **SAMPLING, **{CACHE: cache})))


def test_adapters_of_a_reward_model():
    """Enabled before or after PEFT wraps it."""
    model_type, arguments = ARCHITECTURES["llama-gqa"]
    prompts, scores = ragged_prompts(20, 17), []
    for enabled in ("never", "before", "after"):
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **arguments, vocab_size=VOCABULARY, pad_token_id=0, num_labels=1)
        model = AutoModelForSequenceClassification.from_config(config)
        if enabled == "before":
            fd.enable(model)
        wrapper = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False)).eval()
        if enabled == "after":
            fd.enable(wrapper)
        assert fd.explain(wrapper).enabled == fd.explain(model).enabled == (enabled != "never")
        loss = wrapper(**prompts, labels=torch.ones(2)).loss
        loss.backward()
        scores.append([loss, *(one.grad for one in wrapper.parameters() if one.requires_grad)])
        assert not fd.explain(fd.disable(wrapper)).enabled
    assert len(scores[0]) > 5
    for others in scores[1:]:
        assert all(map(torch.equal, others, scores[0]))
