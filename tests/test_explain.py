"""What `explain` tells of calls: shared, stock, and failed ones."""

import threading

import pytest
import torch
from transformers import LogitsProcessor

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from .architectures.classes import tiny_model_of
from .short_calls import PROMPT, SAMPLING


def test_explain_reads_as_text(model):
    assert "not enabled" in str(fd.explain(model))
    with fd.enabled(model):
        assert "no generate call yet" in str(fd.explain(model))
        model.generate(**PROMPT, **SAMPLING)
        report = fd.explain(model)
        text = str(report)
        assert "layers 0-1: prefill" in text
        assert "1 node(s) of 80 tokens at depth 0 by cpu" in " ".join(text.split())
        assert "tokens prefilled: 80 (stock: 240)" in text
        per_token = 2 * 2 * 2 * 16 * 4
        assert report.last_call.nbytes.stored == (80 + 3 * 5) * per_token
        assert report.last_call.nbytes.stock == 3 * 85 * per_token
        model.generate(**PROMPT, use_cache=False, max_new_tokens=2)
        assert "stock (use_cache=False; pass use_cache=True)" in str(fd.explain(model))
        model.generate(**PROMPT, num_beams=2, max_new_tokens=2)
        text = str(fd.explain(model))
        assert "steps: eager (the model must be on one CUDA device, got" in " ".join(text.split())
        assert "generation mode 'beam_search' uses another decoding loop" in " ".join(text.split())


def test_a_prompt_and_a_notebook_show_what_print_does(model):
    """In 80 columns, whatever the length of a reason; layers of equal reports in one line."""
    with fd.enabled(model):
        for arguments in (SAMPLING, {"use_cache": False, "max_new_tokens": 2}):
            model.generate(**PROMPT, **arguments)
            report = fd.explain(model)
            assert repr(report) == str(report)
            assert max(map(len, str(report).splitlines())) <= 80
            words = " ".join(str(report).split())
            assert all(" ".join(line.split()) in words for line in report.last_call.lines())
    report.last_call.reason = 60 * "word " + 100 * "x"
    assert max(map(len, str(report).splitlines()[:-1])) <= 80
    call = fd.CallReport("shared", layers=["a", "a", "b", "a", "a", "a", "b"])
    assert call.lines()[-2:] == ["  layers 0-1, 3-5: a", "  layers 2, 6: b"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 0}, "ValueError: "),
        ({"use_cache": False, CACHE: "cache", "max_new_tokens": 2}, "cannot use a SharedContextCache"),
        ({**SAMPLING, "streamer": "broken"}, "RuntimeError: no more"),
    ],
    ids=["arguments", "cache", "within"],
)
def test_a_call_that_raised_is_told_as_that(model, arguments, error):
    class Broken:
        def put(self, tokens):
            raise RuntimeError("no more")

    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        given = {"cache": fd.prefill(model, PROMPT["input_ids"][:, :70]), "broken": Broken()}
        with pytest.raises((ValueError, RuntimeError)):
            model.generate(**PROMPT, **{name: given.get(value, value) for name, value in arguments.items()})
        assert fd.explain(model).last_call.path == "failed"
        assert "last generate call: failed (" in str(fd.explain(model))
        assert error in " ".join(str(fd.explain(model)).split())
        model.generate(**PROMPT, **SAMPLING)
        assert fd.explain(model).last_call.path == "shared"


def test_a_failed_call_is_told_of_itself_only(model):
    """One inside another, whose error the other survives; and an error that cannot be written."""

    class UnwrittenError(Exception):
        def __str__(self):
            return self.missing

    class Inner(LogitsProcessor):
        def __call__(self, ids, scores):
            with pytest.raises(ValueError, match="nonsense"):
                model.generate(**PROMPT, nonsense=1)
            return scores

    class Fails(LogitsProcessor):
        def __call__(self, ids, scores):
            raise UnwrittenError

    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING, logits_processor=[Inner()])
        with pytest.raises(UnwrittenError):
            model.generate(**PROMPT, **SAMPLING, logits_processor=[Fails()])
        assert fd.explain(model).last_call.reason == "UnwrittenError"
        waiting, going = threading.Event(), threading.Event()

        class Late(LogitsProcessor):
            def __call__(self, ids, scores):
                waiting.set()
                going.wait()
                raise RuntimeError("late")

        def other():
            with pytest.raises(RuntimeError, match="late"):
                model.generate(**PROMPT, **SAMPLING, logits_processor=[Late()])

        thread = threading.Thread(target=other)
        thread.start()
        waiting.wait()
        model.generate(**PROMPT, **SAMPLING)
        going.set()
        thread.join()
        assert fd.explain(model).last_call.path == "shared"


@pytest.mark.parametrize(
    "forced", [{"sampler": "fast"}, {"backend": "triton"}, {"backend": "plain", "sampler": "fast"}]
)
def test_what_was_forced_and_not_used_is_told(model, caplog, forced):
    with fd.enabled(model, **forced), caplog.at_level("WARNING", logger="hf_fastdecode"):
        model.generate(PROMPT["input_ids"][:, :5], **SAMPLING)
        reason = fd.explain(model).last_call.reason
    assert reason.endswith(f"; {', '.join(f'{name}={value!r}' for name, value in forced.items())} not used")
    assert reason in caplog.text


@pytest.mark.skipif(CACHE == "past_key_values", reason="there Kosmos-2 generates with images alone")
def test_a_generate_that_calls_that_of_parts_is_told(caplog):
    """Kosmos-2's, whose text model generates and shares if it is enabled."""
    model = tiny_model_of("Kosmos2ForConditionalGeneration")
    prompt = {"input_ids": PROMPT["input_ids"][:, -40:]}
    stock = model.generate(**prompt, max_new_tokens=3)
    with fd.enabled(model), caplog.at_level("WARNING", logger="hf_fastdecode"):
        assert torch.equal(model.generate(**prompt, max_new_tokens=3), stock)
        call = fd.explain(model).last_call
    expected = "generate of Kosmos2ForConditionalGeneration does not call that of transformers for this model; enable "
    assert (call.path, call.reason) == ("stock", expected + "the parts that generate, and explain them: text_model")
    assert call.reason in caplog.text
    with fd.enabled(model.text_model, min_saved_tokens=1):
        assert torch.equal(
            model.generate(**{"input_ids": prompt["input_ids"].repeat(3, 1)}, max_new_tokens=3)[:1], stock
        )
        assert fd.explain(model.text_model).last_call.path == "shared"


LOOPS_OF_FOLDERS = {
    "its own": ("return input_ids", "stock", "custom_generate='{folder}' decodes by itself"),
    "generate": (
        "return model.generate(input_ids, **options)",
        "shared",
        "160 of 240 context tokens are shared by rows",
    ),
}


@pytest.mark.parametrize("kind", LOOPS_OF_FOLDERS)
def test_a_loop_that_generate_loads_from_a_folder(model, tmp_path, kind):
    """The report is of the call of `generate` that the loop makes, if it makes one."""
    code, path, reason = LOOPS_OF_FOLDERS[kind]
    (tmp_path / "custom_generate").mkdir()
    whole = f"def generate(model, input_ids, **_):\n    options = {SAMPLING}\n    {code}\n"
    (tmp_path / "custom_generate" / "generate.py").write_text(whole)
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING, custom_generate=str(tmp_path), trust_remote_code=True)
        call = fd.explain(model).last_call
    assert (call.path, call.reason) == (path, reason.format(folder=tmp_path))


def test_stocks_own_are_never_unused(model):
    with fd.enabled(model, sampler="hf", mode="eager"):
        model.generate(PROMPT["input_ids"][:, :5], **SAMPLING)
        assert "not used" not in fd.explain(model).last_call.reason
