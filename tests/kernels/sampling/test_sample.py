"""The kernel against its specification, draw for draw, interpreted on the CPU or compiled on a GPU."""

import pytest
import torch

pytest.importorskip("triton")
from hf_fastdecode.kernels.sampling import reference
from hf_fastdecode.kernels.sampling.api import Config, Settings, sample, seen_tokens, suppressed_tokens

from ...cases import exhaustive_but
from .cases import CHAINS, assert_drawn_from, ids_of, name_of, processed_by_transformers, settings_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Config(32, group=2, tile=16, warps=4)


def random_logits(rows: int, vocab: int, *, seed: int = 0, dtype: torch.dtype = torch.float32, spread: float = 2.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(DEVICE, dtype)


def assert_specified(logits, settings, config=SMALL, row_ids=None, seen=None, steps=None):
    row_ids = ids_of(len(logits), DEVICE) if row_ids is None else row_ids
    expected, logprobs = reference.sample(
        logits, row_ids, settings, columns=config.columns, seen=None if seen is None else seen.clone(), steps=steps
    )
    tokens = torch.full_like(expected, -7)
    got, got_logprobs = sample(
        logits,
        row_ids,
        settings,
        seen=seen,
        steps=steps,
        tokens=tokens,
        logprobs=torch.full_like(logprobs, torch.nan),
        config=config,
    )
    assert got is tokens
    assert got.tolist() == expected.tolist()
    torch.testing.assert_close(got_logprobs, logprobs, rtol=3e-6, atol=3e-6)  # a sum over the vocabulary in fp32
    return got


# A k above the tile's columns, as 20 and more are, and ties beyond it, take the passes over the row instead.
@pytest.mark.parametrize("numbers", CHAINS, ids=name_of)
@pytest.mark.parametrize("config", [SMALL, Config(64, group=4, tile=64, warps=4)], ids=["tile16", "tile64"])
def test_every_chain_draws_what_is_specified(numbers, config):
    logits = random_logits(
        5 if "typical_p" in numbers else 10, 300, dtype=torch.float16 if "min_p" in numbers else torch.float32
    )
    assert_specified(logits, settings_for(numbers, DEVICE, seed=11, step=3), config)


@pytest.mark.parametrize("vocab", exhaustive_but([1, 31, 64, 65, 1000], [1, 2, 31, 33, 50, 64, 65, 257, 1000, 3000]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_odd_vocabularies(vocab, dtype):
    logits = random_logits(4, vocab, seed=vocab, dtype=dtype)
    config = SMALL if vocab < 1000 else Config(256, tile=32, warps=4)
    assert_specified(logits, settings_for({"top_p": 0.6, "top_k": 12}, DEVICE, seed=2), config)
    assert_specified(logits, settings_for({"top_p": 0.5}, DEVICE, seed=2), config)
    assert_specified(logits, Settings(DEVICE, greedy=True), config)


@pytest.mark.parametrize(
    "numbers",
    [{"top_k": 3}, {"top_k": 30}, {"top_p": 0.55}, {"top_k": 30, "top_p": 0.73}, {"top_p": 0.77, "typical_p": 0.6}],
    ids=name_of,
)
def test_ties(numbers):
    """Top-k keeps every token that ties with the k-th; top-p keeps the last ones of those that tie at its edge."""
    logits = torch.randint(0, 4, (3, 150), generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.float16)
    assert_specified(logits, settings_for(numbers, DEVICE, seed=4))


def test_all_logits_equal():
    logits = torch.zeros(3, 100, device=DEVICE)
    assert_specified(logits, settings_for({"top_k": 5}, DEVICE, seed=1))  # all of them tie
    drawn = assert_specified(logits, settings_for({"top_p": 0.255}, DEVICE, seed=1))
    assert drawn.min() >= 74


@pytest.mark.parametrize(
    "numbers", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}, {"top_p": 0.0, "typical_p": 0.9}], ids=name_of
)
def test_filters_that_leave_one_token(numbers):
    logits = random_logits(6, 200)
    assert torch.equal(assert_specified(logits, settings_for(numbers, DEVICE)), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.01, 0.3, 1.0, 7.0])
def test_temperatures(temperature):
    logits = random_logits(6, 200, spread=4.0)
    for numbers in ({"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}):
        assert_specified(logits, settings_for(numbers, DEVICE, temperature=temperature))


def test_greedy_takes_the_first_of_equals():
    logits = torch.randint(0, 3, (20, 130), generator=torch.Generator().manual_seed(0)).to(DEVICE).float()
    tokens, _ = sample(logits, ids_of(20, DEVICE), Settings(DEVICE, greedy=True), config=SMALL)
    assert torch.equal(tokens, torch.tensor([row.index(max(row)) for row in logits.tolist()], device=DEVICE))


def test_a_draw_depends_on_the_row_id_and_not_on_the_place_or_the_batch():
    logits = random_logits(12, 120)
    settings = settings_for({"top_p": 0.9}, DEVICE, seed=9, step=4)
    row_ids = torch.tensor([5, 3, 40, 2, 0, 7, 9, 100000, 12, 13, 1, 6], dtype=torch.int32, device=DEVICE)
    tokens, logprobs = sample(logits, row_ids, settings, config=SMALL)
    place = torch.tensor([7, 2, 9, 0], device=DEVICE)
    some, some_logprobs = sample(logits[place], row_ids[place], settings, config=SMALL)
    assert torch.equal(some, tokens[place])
    assert torch.equal(some_logprobs, logprobs[place])
    again, _ = sample(logits, row_ids, settings, config=SMALL)
    assert torch.equal(again, tokens)


@pytest.mark.parametrize("change", [{"seed": 10}, {"seed": 9 + 2**40}, {"step": 5}, {"step": 4 + 2**33}])
def test_seed_and_step_change_the_draws(change):
    logits = torch.zeros(16, 120, device=DEVICE)
    settings = settings_for({}, DEVICE, seed=9, step=4)
    before, _ = sample(logits, ids_of(16, DEVICE), settings, config=SMALL)
    settings.update(**change)
    after = assert_specified(logits, settings)
    assert (before != after).sum() > 8


def test_each_row_may_be_at_a_step_of_its_own():
    """It draws what it draws where all rows are at this step; end tokens are suppressed by its own step too."""
    logits = random_logits(6, 120)
    settings = Settings(DEVICE, eos_token_ids=tuple(range(60)))
    settings.update(seed=9, min_new_tokens=3)
    steps = torch.tensor([0, 7, 2, 3, 2**33, 4], device=DEVICE)
    tokens = assert_specified(logits, settings, steps=steps)
    for row, step in enumerate(steps.tolist()):
        settings.update(step=step)
        alike, _ = sample(logits, ids_of(6, DEVICE), settings, config=SMALL)
        assert tokens[row] == alike[row]
    assert (tokens[[0, 2]] >= 60).all()


def test_rows_of_equal_logits_draw_apart():
    tokens, _ = sample(torch.zeros(16, 500, device=DEVICE), ids_of(16, DEVICE), settings_for({}, DEVICE), config=SMALL)
    assert tokens.unique().numel() > 10


def test_skipped_rows_get_the_pad_token():
    logits = random_logits(4, 60)
    logits[1] = torch.nan
    row_ids = torch.tensor([0, -1, 2, -1], dtype=torch.int32, device=DEVICE)
    tokens = assert_specified(logits, settings_for({"top_p": 0.9}, DEVICE, pad_token_id=17), row_ids=row_ids)
    assert tokens[[1, 3]].tolist() == [17, 17]


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_repetition_penalty_over_steps(greedy):
    logits = random_logits(5, 70)
    row_ids = torch.tensor([3, 0, -1, 6, 1], dtype=torch.int32, device=DEVICE)
    settings = Settings(DEVICE, greedy=greedy, penalty=True)
    settings.update(repetition_penalty=3.0, top_p=0.9, top_k=20)
    prompt = torch.randint(0, 70, (8, 12), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    seen = seen_tokens(prompt, 70)
    ids = prompt.clone()
    for step in range(4):
        settings.step.fill_(step)
        tokens = assert_specified(logits, settings, row_ids=row_ids, seen=seen)
        real = row_ids >= 0
        grown = torch.cat([ids, ids[:, -1:]], 1)
        grown[row_ids[real].long(), -1] = tokens[real]
        ids = grown
        assert torch.equal(seen, seen_tokens(ids, 70))


def test_seen_tokens_leaves_out_what_is_not_kept_or_not_in_the_vocabulary():
    ids = torch.tensor([[0, 31, 32, 80]])
    assert seen_tokens(ids, 70).tolist() == [[1 - 2**31, 1, 0]]
    assert seen_tokens(ids, 70, torch.tensor([[False, True, True, True]])).tolist() == [[-(2**31), 1, 0]]


@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
def test_end_tokens_wait_for_min_new_tokens(greedy):
    logits = random_logits(6, 70)
    logits[:, 5] += 20
    logits[:, 66] += 19
    settings = Settings(DEVICE, greedy=greedy, top_k=False, eos_token_ids=[5, 66])
    settings.update(min_new_tokens=2, top_p=0.9)
    for step in range(4):
        settings.step.fill_(step)
        tokens = assert_specified(logits, settings)
        assert bool(((tokens == 5) | (tokens == 66)).all()) == (step >= 2)


SUPPRESSION = {
    "greedy": None,
    "plain": {},
    "top-p": {"top_p": 0.8},
    "top-k": {"top_k": 10},
    "typical": {"typical_p": 0.7},
}


@pytest.mark.parametrize("numbers", SUPPRESSION.values(), ids=SUPPRESSION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_suppressed_tokens_are_not_drawn(numbers, dtype):
    """The likeliest ones, at every step and at one; whole columns of the row are among them."""
    logits = random_logits(6, 150, dtype=dtype)
    always, at_begin = torch.tensor([5, *range(32, 160)]), torch.tensor([2, 7])
    logits[:, [5, 40]] += 20
    logits[:, 7] += 15
    marks = suppressed_tokens(always, at_begin, 150, DEVICE)
    given = {"top_k": "top_k" in (numbers or {}), "typical": "typical_p" in (numbers or {}), "suppressed": marks}
    settings = Settings(DEVICE, greedy=numbers is None, **given)
    settings.update(begin_step=1, temperature=0.8, **(numbers or {}))
    for step in range(3):
        settings.update(step=step)
        tokens = assert_specified(logits, settings)
        assert not torch.isin(tokens.cpu(), always).any()
        assert bool((tokens == 7).all()) == (step != 1)
    steps = torch.tensor([0, 1, 2, 1, 2**33 + 1, 0], device=DEVICE)
    tokens = assert_specified(logits, settings, steps=steps)
    assert ((tokens != 7) == (steps == 1)).all()


def test_suppression_with_a_penalty_and_end_tokens():
    logits = random_logits(5, 70)
    logits[:, [5, 6, 7]] += 20
    settings = Settings(
        DEVICE, penalty=True, eos_token_ids=[5], suppressed=suppressed_tokens(torch.tensor([6]), None, 70, DEVICE)
    )
    settings.update(min_new_tokens=2, repetition_penalty=1e6)
    seen = seen_tokens(torch.full((5, 1), 7, device=DEVICE), 70)
    for step in range(3):
        settings.update(step=step)
        tokens = assert_specified(logits, settings, seen=seen)
        assert bool((tokens == 5).all()) == (step == 2)


def test_marks_leave_out_tokens_beyond_the_vocabulary():
    marks = suppressed_tokens(torch.tensor([1, -1, 4]), torch.tensor([]), 4, "cpu")
    assert marks.tolist() == [[0, 1, 0, 0]] * 2
    assert suppressed_tokens(None, torch.tensor([3, 90]), 4, "cpu").tolist() == [[0, 0, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("numbers", [{}, {"top_p": 0.8}, {"top_k": 10}, {"typical_p": 0.7}], ids=name_of)
@pytest.mark.parametrize("removed", [-torch.inf, torch.nan], ids=["inf", "nan"])
def test_removed_logits_are_never_drawn(numbers, removed):
    logits = random_logits(6, 90)
    logits[torch.rand(6, 90, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.9] = removed
    logits[:, 40] = 0.5
    assert_specified(logits, settings_for(numbers, DEVICE))


@pytest.mark.parametrize("temperature", [0.1, 1.0])
@pytest.mark.parametrize(
    "numbers", [None, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.9, "typical_p": 0.5}], ids=str
)
def test_a_row_without_tokens_or_with_an_infinite_one(numbers, temperature):
    logits = random_logits(4, 90)
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    settings = Settings(DEVICE, greedy=True) if numbers is None else settings_for(numbers, DEVICE)
    settings.update(temperature=temperature)
    tokens, logprobs = sample(logits, ids_of(4, DEVICE), settings, config=SMALL)
    assert tokens[1] == 0
    assert 0 <= tokens[2] < 90
    assert logprobs.isnan().tolist() == [False, True, True, False]
    expected, expected_logprobs = reference.sample(logits, ids_of(4, DEVICE), settings, columns=SMALL.columns)
    assert expected[[0, 1, 3]].tolist() == tokens[[0, 1, 3]].tolist()
    assert expected_logprobs.isnan().tolist() == logprobs.isnan().tolist()


def test_rows_may_lie_apart():
    wide = random_logits(8, 100)
    assert_specified(wide[::2, :77], settings_for({"top_p": 0.8}, DEVICE))


@pytest.mark.parametrize("by", ["end tokens", "marks"])
def test_where_all_tokens_are_suppressed_none_is_drawn(by):
    marks = suppressed_tokens(torch.arange(60), None, 60, DEVICE) if by == "marks" else None
    settings = Settings(DEVICE, eos_token_ids=range(60) if marks is None else (), suppressed=marks)
    settings.update(min_new_tokens=0 if marks is not None else 1)
    logits = random_logits(2, 60)
    tokens, logprobs = sample(logits, ids_of(2, DEVICE), settings, config=SMALL)
    expected, expected_logprobs = reference.sample(logits, ids_of(2, DEVICE), settings, columns=SMALL.columns)
    assert tokens.tolist() == expected.tolist() == [0, 0]
    assert logprobs.isnan().all()
    assert expected_logprobs.isnan().all()


def test_rows_without_marks_are_skipped():
    """What lies behind ``seen`` is not touched."""
    settings = Settings(DEVICE, penalty=True)
    settings.update(repetition_penalty=1.3, pad_token_id=7)
    memory = torch.zeros(6, 2, dtype=torch.int32, device=DEVICE)
    row_ids = torch.tensor([1, 5, 2], dtype=torch.int32, device=DEVICE)
    logits = random_logits(3, 50)
    expected, expected_logprobs = reference.sample(
        logits, row_ids, settings, columns=SMALL.columns, seen=memory[:2].clone()
    )
    tokens, logprobs = sample(logits, row_ids, settings, seen=memory[:2], config=SMALL)
    assert (tokens[1:].tolist(), logprobs[1:].tolist()) == ([7, 7], [0.0, 0.0])
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs)
    assert not memory[[0, 2, 3, 4, 5]].any() and memory[1].any()


def test_settings_refuse_what_they_cannot_do():
    settings = Settings("cpu", top_k=False)
    for change, message in (
        ({"top_k": 5}, "top_k=5 needs Settings"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"top_p": 1.5}, r"top_p must be within \[0, 1\], got 1.5"),
        ({"seed": 1.5}, r"seed must be an integer, got 1\.5"),
        ({"top_k": float("inf")}, "top_k must be an integer, got inf"),
        ({"seed": float("nan")}, "seed must be an integer, got nan"),
        ({"step": -1}, "step must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            settings.update(**change)
    with pytest.raises(TypeError, match="no setting is called 'top_q'"):
        settings.update(top_q=1)
    assert settings.top_p == 1


def test_sample_refuses_what_does_not_fit():
    logits, settings = torch.zeros(2, 40), Settings("cpu", penalty=True)
    suppressing = Settings("cpu", suppressed=suppressed_tokens(None, None, 41, "cpu"))
    shapes = ((torch.zeros(shape), ids_of(2), settings, {}) for shape in ((40,), (1, 2, 40), (2, 0)))
    for *given, options, message in (
        *((*one, r"logits must be \[rows, vocabulary\], got shape") for one in shapes),
        (logits, ids_of(2), settings, {}, r"needs seen \[row ids, 2\] int32"),
        (logits, ids_of(2), suppressing, {}, "suppress tokens of a vocabulary of 41, and the logits have 40"),
        (logits.double(), ids_of(2), settings, {}, r"fp32, bf16 or fp16, got torch\.float64"),
        (logits, ids_of(3), settings, {}, r"row_ids must be \[2\] int32, contiguous .*, got \[3\]"),
        (logits, ids_of(4)[::2], settings, {}, r"row_ids must be \[2\] int32, contiguous .* strides \(2,\)"),
        (logits, ids_of(2), settings, {"tokens": ids_of(2)}, r"tokens must be \[2\] int64, .*, got \[2\] int32"),
        (logits, ids_of(2), settings, {"logprobs": torch.zeros(4)[::2]}, r"logprobs must be .* strides \(2,\)"),
        (torch.zeros(40, 2).mT, ids_of(2), settings, {}, "contiguous along the vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            sample(*given, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("numbers", [*CHAINS, {"top_k": 500, "top_p": 0.9}], ids=name_of)
@pytest.mark.parametrize(
    ("vocab", "spread", "dtype"),
    [
        (50, 2.0, torch.float32),
        (1000, 1.0, torch.bfloat16),
        (32000, 3.0, torch.bfloat16),
        (152064, 5.0, torch.float16),
    ],
    ids=["V50-fp32", "V1000-bf16", "V32000-bf16", "V152064-fp16"],
)
def test_a_million_draws(numbers, vocab, spread, dtype):
    logits = random_logits(1, vocab, seed=vocab, dtype=dtype, spread=spread)
    settings = settings_for(numbers, "cuda", seed=1)
    counts = torch.zeros(vocab, dtype=torch.int64, device="cuda")
    each = 50000
    oracle = logits[0].double().log_softmax(-1)
    for step in range(20):
        settings.step.fill_(step)
        tokens, logprobs = sample(logits.expand(each, -1), ids_of(each, "cuda"), settings)
        counts += tokens.bincount(minlength=vocab)
        torch.testing.assert_close(logprobs.double(), oracle[tokens], rtol=0, atol=2e-6)
    # Transformers' sort breaks ties as it likes and its sums have errors at the edge; the specification has neither.
    assert_drawn_from(counts, reference.distribution(logits, ids_of(1, "cuda"), settings)[0])
    if dtype == torch.float32:
        assert_drawn_from(counts, processed_by_transformers(logits, numbers)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("numbers", CHAINS, ids=name_of)
@pytest.mark.parametrize("vocab", [32000, 50257, 152064])
def test_large_vocabularies_draw_what_is_specified(numbers, vocab):
    from hf_fastdecode.kernels.sampling.api import choose_config

    logits = random_logits(24, vocab, seed=vocab, dtype=torch.bfloat16, spread=3.0)
    settings = settings_for(numbers, "cuda", seed=3)
    expected, _ = reference.sample(logits, ids_of(24, "cuda"), settings, columns=choose_config(vocab).columns)
    tokens, _ = sample(logits, ids_of(24, "cuda"), settings)
    assert (tokens != expected).sum() <= 1  # a uniform number may fall within rounding of an edge


@pytest.mark.gpu
@pytest.mark.parametrize("numbers", CHAINS, ids=name_of)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_thousands_of_rows_draw_what_is_specified(numbers, penalty):
    """Enough rows that a token which the filters just keep is drawn many times."""
    logits = random_logits(5000, 200, seed=1)
    settings = Settings("cuda", typical="typical_p" in numbers, penalty=penalty != 1)
    settings.update(temperature=0.8, repetition_penalty=penalty, seed=6, **numbers)
    seen = seen_tokens(torch.randint(0, 200, (5000, 90), device="cuda"), 200)
    config = Config(64, group=2, tile=32, warps=4)
    expected, _ = reference.sample(logits, ids_of(5000, "cuda"), settings, columns=64, seen=seen)
    tokens, _ = sample(logits, ids_of(5000, "cuda"), settings, seen=seen, config=config)
    assert (tokens != expected).sum() <= 2  # a uniform number may fall within rounding of an edge


@pytest.mark.gpu
def test_a_captured_graph_serves_other_settings():
    logits, row_ids = random_logits(9, 5000, dtype=torch.bfloat16), ids_of(9, "cuda")
    settings = Settings("cuda", penalty=True, eos_token_ids=[3])
    seen = torch.zeros(9, 157, dtype=torch.int32, device="cuda")
    config = Config(1024, warps=4)
    sample(logits, row_ids, settings, seen=seen, config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, logprobs = sample(logits, row_ids, settings, seen=seen, config=config)
        settings.step.add_(1)
    seen.zero_()
    for numbers in ({"top_p": 0.9}, {"top_k": 20, "temperature": 0.5}, {"repetition_penalty": 1.7}, {"seed": 8}):
        settings.update(**numbers)
        expected, expected_logprobs = reference.sample(logits, row_ids, settings, columns=1024, seen=seen)
        graph.replay()
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(logprobs, expected_logprobs, rtol=3e-6, atol=3e-6)
    assert settings.step == 4
