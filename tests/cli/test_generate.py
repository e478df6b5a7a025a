"""`generate`: prompts, bounds of options, completions with their log-probabilities, and what is printed."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import Result

from hf_fastdecode.assets import embedded_tasks, few_shot_prompt
from hf_fastdecode.cli.generate import read_prompts
from hf_fastdecode.cli.models import draw, encode, read_completions
from hf_fastdecode.cli.options import Sampling, parse_counts
from hf_fastdecode.errors import InputError, one_line
from hf_fastdecode.generation.decoding.sampling import TokenLogProbs
from hf_fastdecode.measurement.calls import Drawn, end_tokens_of

from .command_line import PROMPT, ran, run


def stdin(content: bytes = b"", *, terminal: bool = False) -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO(content))
    stream.isatty = lambda: terminal
    return stream


def test_the_three_places(tmp_path: Path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("  é\r\n\n".encode())
    assert read_prompts(["a ", "b"], [], stdin(b"not read")) == ["a ", "b"]
    second = tmp_path / "second.txt"
    second.write_text("b")
    assert read_prompts([], [file], stdin(b"not read")) == ["  é\r\n\n"]
    assert read_prompts([], [second, file, second], stdin(b"not read")) == ["b", "  é\r\n\n", "b"]
    assert read_prompts([], [], stdin(b"from a pipe\n")) == ["from a pipe\n"]


def test_what_is_no_prompt(tmp_path: Path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    empty = tmp_path / "empty"
    empty.touch()
    text = tmp_path / "text"
    text.write_text("a")
    for arguments, message in (
        ((["a"], [binary], stdin()), "both given"),
        ((["a", ""], [], stdin()), "prompt 1 \\(from --prompt\\) is empty"),
        (([], [tmp_path / "missing"], stdin()), "missing: No such file"),
        (([], [tmp_path], stdin()), "is a folder"),
        (([], [binary], stdin()), "not UTF-8 text \\(byte 2 is 0xff\\)"),
        (([], [empty], stdin()), "prompt 0 \\(from .*empty\\) is empty"),
        (([], [text, empty, text], stdin()), "prompt 1 \\(from .*empty\\) is empty"),
        (([], [], stdin(b"\xfe")), "stdin is not UTF-8"),
        (([], [], stdin()), "\\(from stdin\\) is empty"),
        (([], [], stdin(terminal=True)), "there is no prompt; pass --prompt"),
    ):
        with pytest.raises(InputError, match=message):
            read_prompts(*arguments)


def test_an_argument_is_utf8_whatever_the_locale():
    as_ascii = "é".encode().decode("ascii", "surrogateescape")
    assert read_prompts([as_ascii], [], stdin()) == ["é"]
    with pytest.raises(InputError, match="--prompt is not UTF-8 text"):
        read_prompts([b"a\xff".decode("ascii", "surrogateescape")], [], stdin())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("n", 0, "--n must be at least 1, got 0"),
        ("max_new_tokens", -3, "--max-new-tokens must be at least 1, got -3"),
        (
            "temperature",
            0.0,
            "--temperature must be at least 1e-06 and finite, got 0; `hf-fastdecode generate --greedy` takes",
        ),
        ("temperature", 1e-38, "got 1e-38"),
        ("temperature", -1.0, "got -1"),
        ("temperature", math.inf, "got inf"),
        ("temperature", math.nan, "got nan"),
        ("top_p", 0.0, "--top-p must be above 0 and at most 1, got 0"),
        ("top_p", 1.01, "got 1.01"),
        ("top_p", math.nan, "got nan"),
        ("top_k", -1, "--top-k must be at least 0, got -1"),
        ("seed", -1, "--seed must be at least 0"),
        ("seed", 2**63, "below 2\\*\\*63"),
    ],
)
def test_out_of_bounds(option, value, message):
    with pytest.raises(InputError, match=message):
        Sampling(**{option: value})


def test_defaults_depend_on_greedy():
    assert [Sampling(greedy=greedy).n for greedy in (False, True)] == [4, 1]


@pytest.mark.parametrize(("option", "default"), [("temperature", 0.8), ("top_p", 0.95), ("top_k", 0)])
def test_greedy_contradicts_sampling_options(option, default):
    """Also one that is given as it is by default."""
    flag = "--" + option.replace("_", "-")
    assert getattr(Sampling(greedy=True), option) == getattr(Sampling(), option) == default
    for value in (1, default):
        with pytest.raises(InputError, match=f"{flag} {value} has no effect with --greedy; leave one of the two out"):
            Sampling(greedy=True, **{option: value})


def test_greedy_samples_are_all_equal():
    with pytest.raises(InputError, match="got n = 3; use --n 1"):
        Sampling(greedy=True, n=3)


def test_counts_rise():
    assert parse_counts("questions", "16,1, 4,16") == [1, 4, 16]


@pytest.mark.parametrize("text", ["", "0", "4,,8", "1.5", "-2", "²", "many"])
def test_counts_of_another_form_are_refused(text):
    with pytest.raises(InputError, match="--questions must be whole numbers of at least 1 with commas between, got"):
        parse_counts("questions", text)


def test_one_line_of_an_error():
    assert one_line(ValueError("first\n  second.\n")) == "first second"
    assert one_line(ValueError()) == "ValueError"
    assert len(one_line(ValueError("word " * 200))) <= 400


PROMPTS = ["assert length('red') == 3", "def add(a, b):\n    return"]


class Letters:
    """A tokenizer of one letter per token that strips a space from the start of a text, as SentencePiece's do."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: object) -> str:
        text = "".join(chr(token) for token in ids)
        return (text.replace("$", "") if skip_special_tokens else text).removeprefix(" ")


def read(prompt: str, *completions: str, stop: tuple[str, ...] = (), n: int = 1) -> list:
    """Completions of rows that stand after one prompt, with ``$`` as the end token and ``~`` as padding."""
    width = max(map(len, completions))
    rows = [[ord(letter) for letter in prompt + completion.ljust(width, "~")] for completion in completions]
    log_probs = -torch.arange(1.0, width + 1).repeat(len(rows), 1)
    drawn = Drawn(torch.tensor(rows), len(prompt), log_probs, None, 0.0, [], 0.0)
    return read_completions(drawn, Letters(), Sampling(n=n), end_tokens=[ord("$")], stop=stop)


def test_an_end_token_ends_a_completion():
    ended, cut = read("ab", "xy$", "xyzzy", n=2)
    assert (ended.text, ended.tokens, ended.finish) == ("xy", 3, "stop")
    assert ended.mean_logp == -2
    assert (cut.text, cut.tokens, cut.finish) == ("xyzzy", 5, "length")
    assert cut.mean_logp == -3


def test_rows_are_prompt_by_prompt():
    found = read("ab", "1", "2", "3", "4", n=2)
    assert [(one.prompt, one.sample, one.text) for one in found] == [
        (0, 0, "1"),
        (0, 1, "2"),
        (1, 0, "3"),
        (1, 1, "4"),
    ]


def test_the_first_space_belongs_to_the_completion():
    assert read("ab", "  x")[0].text == "  x"


@pytest.mark.parametrize(
    ("completion", "stop", "text", "tokens", "finish"),
    [
        ("one. two.", (".",), "one", 4, "stop"),
        ("one two", (".",), "one two", 7, "length"),
        ("one$. two", (".",), "one", 4, "stop"),
        ("one; two.", (".", "; t"), "one", 6, "stop"),
    ],
)
def test_stop_strings(completion, stop, text, tokens, finish):
    found = read("ab", completion, stop=stop)[0]
    assert (found.text, found.tokens, found.finish) == (text, tokens, finish)


def test_log_probs_are_those_of_output_logits(loaded):
    model, tokenizer = loaded
    inputs = encode(model, tokenizer, PROMPTS, 12)
    found = draw(model, inputs, Sampling(n=3, max_new_tokens=12, temperature=0.7, top_p=0.8, seed=5))
    torch.manual_seed(5)
    out = model.generate(
        **inputs,
        do_sample=True,
        temperature=0.7,
        top_p=0.8,
        top_k=0,
        max_new_tokens=12,
        num_return_sequences=3,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert torch.equal(found.sequences, out.sequences)
    logits = torch.stack(out.logits, dim=1)  # [rows, steps, vocabulary]
    tokens = out.sequences[:, found.prompt_length :]
    expected = logits.log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    assert torch.equal(found.log_probs, expected)


def test_a_step_too_many_is_dropped():
    log_probs = TokenLogProbs(lambda drawn: None)
    tokens = torch.tensor([[1, 0, 1]])
    scores = torch.tensor([[0.0, math.log(3)]])
    for step in range(4):
        log_probs(torch.cat([torch.tensor([[9]]), tokens[:, :step]], dim=1), scores)
    assert torch.allclose(log_probs.of(tokens[:, :3]).exp(), torch.tensor([[0.75, 0.25, 0.75]]))


def test_drawing_leaves_the_generator_as_it_was(loaded):
    model, tokenizer = loaded
    inputs = encode(model, tokenizer, PROMPTS[:1], 3)
    state = torch.get_rng_state()
    steps: list[int] = []
    draw(model, inputs, Sampling(n=2, max_new_tokens=3), on_step=steps.append)
    assert torch.equal(torch.get_rng_state(), state)
    assert steps == [0, 1, 2]


def test_prompts_are_padded_on_the_left(loaded):
    model, tokenizer = loaded
    inputs: dict[str, Tensor] = encode(model, tokenizer, PROMPTS, 8)
    assert set(inputs) == {"input_ids", "attention_mask"}
    assert bool(inputs["attention_mask"][:, -1].all())
    assert int(inputs["attention_mask"].sum()) == sum(len(tokenizer(prompt).input_ids) for prompt in PROMPTS)


def test_a_prompt_that_does_not_fit(loaded):
    model, tokenizer = loaded
    with pytest.raises(InputError, match=r"prompt 1 has 1000 tokens, and with 25 new ones .* the 1024 positions"):
        encode(model, tokenizer, ["a", "=" * 1000], 25)


def test_checkpoint_sampling_defaults_are_not_used(loaded):
    model, tokenizer = loaded
    settings = model.generation_config
    assert (settings.repetition_penalty, settings.temperature, settings.top_k, settings.do_sample) == (None,) * 4
    assert end_tokens_of(model) == [tokenizer.eos_token_id]
    inputs = encode(model, tokenizer, PROMPTS[:1], 8)
    rows = draw(model, inputs, Sampling(n=8, max_new_tokens=8)).sequences.tolist()
    assert len({tuple(row) for row in rows}) == 8, "top_k = 1 of the checkpoint would make them equal"


def lines(result: Result) -> list[dict]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_same_seed_same_completions_with_and_without_stock(checkpoint):
    common = ["generate", "--model", checkpoint, "--prompt", PROMPT, "--prompt", PROMPT[9:], "--n", 3]
    common += ["--max-new-tokens", 6, "--seed", 7, "--json"]
    shared, again, stock = run(*common), run(*common), run(*common, "--stock")
    assert "shared (" in shared.stderr
    assert "stock transformers, as asked" in stock.stderr
    assert shared.stdout == again.stdout
    found = lines(shared)
    assert [(line["prompt"], line["sample"]) for line in found] == [(p, s) for p in range(2) for s in range(3)]
    assert len({line["text"] for line in found}) > 1
    for ours, theirs in zip(found, lines(stock), strict=True):
        assert ours.pop("mean_logp") == pytest.approx(theirs.pop("mean_logp"), abs=2e-5)
        assert ours == theirs
    assert {line["text"] for line in lines(run(*common, "--seed", 8))} != {line["text"] for line in found}


def test_texts_on_stdout_and_the_rest_on_stderr(checkpoint):
    common = ["generate", "--model", checkpoint, "--n", 2, "--max-new-tokens", 4]
    result = ran(*common, "--explain", stdin=PROMPT)
    texts = [line["text"] for line in lines(run(*common, "--json", stdin=PROMPT))]
    assert result.stdout == "".join(text if text.endswith("\n") else text + "\n" for text in texts)
    assert result.stderr.startswith("--- prompt 0, sample 0: 4 tokens, mean log-p -")
    assert "last generate call: shared (" in result.stderr
    assert "2 completions, 8 tokens in" in result.stderr


def test_a_short_prompt_is_shared_where_that_is_asked_for(checkpoint):
    common = ["generate", "--model", checkpoint, "--prompt", PROMPT[:40], "--n", 2, "--max-new-tokens", 2, "--explain"]
    assert "(min_saved_tokens)" in run(*common).stderr
    assert "last generate call: shared (" in run(*common, "--min-saved-tokens", 0).stderr


def test_greedy_from_a_file(checkpoint, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    arguments = ["generate", "--model", checkpoint, "--prompt-file", file, "--greedy", "--max-new-tokens", 3, "--json"]
    assert len(lines(run(*arguments))) == 1


def test_a_prompt_from_each_file(checkpoint, tmp_path):
    files = [tmp_path / "first.txt", tmp_path / "second.txt"]
    for file, text in zip(files, (PROMPT, PROMPT[9:]), strict=True):
        file.write_text(text)
    common = ["generate", "--model", checkpoint, "--greedy", "--max-new-tokens", 3, "--json"]
    found = lines(run(*common, "--prompt-file", files[0], "--prompt-file", files[1]))
    assert [line["prompt"] for line in found] == [0, 1]
    assert found == lines(run(*common, "--prompt", PROMPT, "--prompt", PROMPT[9:]))


def test_the_prompt_of_a_task(checkpoint):
    common = ["generate", "--model", checkpoint, "--greedy", "--max-new-tokens", 3, "--json"]
    first, second = embedded_tasks()[:2]
    found = lines(run(*common, "--task-id", first["task_id"], "--task-id", second["task_id"], "--shots", 1))
    texts = [few_shot_prompt(task, 1) for task in (first, second)]
    assert found == lines(run(*common, "--prompt", texts[0], "--prompt", texts[1]))
