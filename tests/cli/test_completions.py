"""Log-probabilities, lengths and texts of completions."""

import math

import pytest
import torch
from torch import Tensor

from hf_fastdecode.cli.completions import draw, encode, read_completions
from hf_fastdecode.cli.sampling import Sampling
from hf_fastdecode.errors import InputError
from hf_fastdecode.generation.decoding.token_log_probs import TokenLogProbs
from hf_fastdecode.measurement.calls import Drawn, end_tokens_of

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
