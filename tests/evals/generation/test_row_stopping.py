"""Rows that end by stop rules of their own."""

import torch

from hf_fastdecode.assets import load_embedded
from hf_fastdecode.evals import generation as row_stopping
from hf_fastdecode.evals.generation import RowStopping
from hf_fastdecode.evals.stop_rules import StopWords


def stopped_after(texts, words, end_tokens=()):
    """How many tokens each text has when its row is stopped; None for rows that are not."""
    _, tokenizer = load_embedded()
    prompt = torch.tensor([tokenizer("say:").input_ids] * len(texts))
    rows = [tokenizer(text).input_ids for text in texts]
    steps = max(map(len, rows))
    rows = [[*row, *[tokenizer.pad_token_id] * (steps - len(row))] for row in rows]
    stopping = RowStopping(tokenizer, [StopWords(own) for own in words], prompt, end_tokens)
    found: list[int | None] = [None] * len(texts)
    for step in range(1, steps + 1):
        ended = stopping(torch.cat([prompt, torch.tensor(rows)[:, :step]], dim=1), None)
        found = [step if is_ended and at is None else at for at, is_ended in zip(found, ended.tolist())]
    assert [at is not None for at in stopping.finished_at] == [at is not None for at in found]
    return found, tokenizer


def test_each_row_ends_at_its_own_word():
    texts = ["one two stop three", "one two stop three", "stop", "nothing"]
    found, tokenizer = stopped_after(texts, [["stop"], ["three"], ["stop"], ["stop"]])
    for text, at, word in zip(texts[:3], found, ("stop", "three", "stop")):
        assert word in tokenizer.decode(tokenizer(text).input_ids[:at])
        assert word not in tokenizer.decode(tokenizer(text).input_ids[: at - 1])
    assert found[3] is None


def test_a_word_across_tokens_and_letters_of_several_bytes():
    found, tokenizer = stopped_after(["naïve \n\nEND of it"], [["\n\nEND"]])
    assert tokenizer.decode(tokenizer("naïve \n\nEND of it").input_ids[: found[0]]).endswith("END")


def test_many_rows_are_looked_at_more_seldom():
    _, tokenizer = load_embedded()
    ids = tokenizer("stop, and so on and on and on").input_ids
    first = next(count for count in range(1, 10) if "stop" in tokenizer.decode(ids[:count]))
    for rows, interval in ((255, 1), (256, 2), (1024, 8)):
        prompt = torch.tensor([tokenizer("say:").input_ids] * rows)
        stopping = RowStopping(tokenizer, [StopWords(["stop"]) for _ in range(rows)], prompt, ())
        text = torch.tensor([ids] * rows)
        ended = [stopping(torch.cat([prompt, text[:, :step]], dim=1), None).all().item() for step in range(1, 10)]
        assert ended.index(True) + 1 == -(-first // interval) * interval


def test_end_tokens_are_noted():
    found, _ = stopped_after(["one two"], [["zzz"]], end_tokens=[load_embedded()[1]("one two").input_ids[1]])
    assert found == [2]


def test_texts_that_do_not_grow_are_decoded_whole(monkeypatch):
    """Some tokenizers' text of more tokens does not begin with that of fewer, which their stream refuses."""

    class Refusing:
        def __init__(self, **arguments):
            self.steps = 0

        def step(self, tokenizer, tokens):
            self.steps += 1
            if self.steps > 2:
                raise Exception("Invalid prefix encountered while decoding stream")
            return tokenizer.decode(tokens)

    text = "one two naïve stop three"
    found, _ = stopped_after([text], [["stop"]])
    monkeypatch.setattr(row_stopping, "DecodeStream", Refusing)
    assert stopped_after([text], [["stop"]])[0] == found
