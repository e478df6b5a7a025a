"""Random operations on kept caches, against the rows' tokens run through the stock model."""

import copy
import random

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..tiny_models import VOCABULARY, tiny_model
from .storage import held

MOST_ROWS, MOST_TOKENS = 6, 260


class Kept:
    """A cache, and beside it what its rows hold.

    Attributes:
        cache: The cache.
        rows: By row, the ids of its tokens.
    """

    def __init__(self, model, rng):
        self.model, self.rng = model, rng
        head = self.ids(rng.choice([0, 9, 33]))
        self.rows = [head + self.ids(rng.randint(1, 40)) for _ in range(rng.randint(1, 3))]
        self.cache = fd.prefill(model, padded(self.rows))

    def ids(self, count):
        return [self.rng.randrange(3, VOCABULARY) for _ in range(count)]

    def fork(self):
        """Either of the two goes on; the other one must not notice."""
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache) if self.rng.random() < 0.2 else self.cache.fork()
        if self.rng.random() < 0.5:
            self.cache, twin.cache = twin.cache, self.cache
        before = copy.copy(twin)
        self.forward()
        before.check()

    def crop(self):
        count = self.rng.randint(0, min(len(row) for row in self.rows) - 1)
        self.cache.crop(-count)
        self.rows = [row[: len(row) - count] for row in self.rows]

    def select(self):
        index = [self.rng.randrange(len(self.rows)) for _ in range(self.rng.randint(1, MOST_ROWS))]
        self.rng.choice([self.cache.select_rows, lambda rows: self.cache.reorder_cache(torch.tensor(rows))])(index)
        self.rows = [self.rows[row] for row in index]

    def reorder(self):
        """As many rows as before: no suffix is copied, if all are of one length."""
        index = [self.rng.randrange(len(self.rows)) for _ in self.rows]
        before = [layer.storage.suffix for layer in self.cache.layers]
        uniform = self.cache.state.suffixes.lengths.per_row is None
        self.cache.reorder_cache(torch.tensor(index))
        assert not uniform or [layer.storage.suffix for layer in self.cache.layers] == before
        self.rows = [self.rows[row] for row in index]

    def drop_last(self):
        """Rows lose different counts, as of drafts that were accepted in part."""
        own = self.cache.suffix_lengths.tolist()
        counts = [self.rng.randint(0, min(most, len(row) - 1)) for most, row in zip(own, self.rows, strict=True)]
        self.cache.drop_last(counts if self.rng.random() < 0.5 else torch.tensor(counts))
        self.rows = [row[: len(row) - count] for row, count in zip(self.rows, counts, strict=True)]

    def repeat(self):
        if 2 * len(self.rows) <= MOST_ROWS:
            self.cache.batch_repeat_interleave(2)
            self.rows = [row for row in self.rows for _ in range(2)]

    def forward(self):
        """A direct pass of some tokens, without positions."""
        new = [self.ids(count) for count in [self.rng.choice([1, 1, 2, 5])] for _ in self.rows]
        with torch.no_grad():
            found = self.model(torch.tensor(new), **{CACHE: self.cache}).logits
        self.rows = [row + tail for row, tail in zip(self.rows, new, strict=True)]
        for row, logits in zip(self.rows, found, strict=True):
            with torch.no_grad():
                torch.testing.assert_close(logits, self.model(torch.tensor([row])).logits[0, -len(logits) :])

    def refused(self):
        """Passes and calls that raise, before anything is stored and in the middle."""
        tokens, prompts = torch.full((len(self.rows), 2), 7), padded(self.rows)
        other = padded([[3 + (row[0] - 2) % (VOCABULARY - 3), *row[1:]] for row in self.rows])
        call = {"max_new_tokens": 2, CACHE: self.cache}
        kinds = {
            "disabled": lambda: self.model(tokens, **{CACHE: self.cache}),
            "disabled generate": lambda: self.model.generate(**prompts, **call),
            "submodule": lambda: self.model.model(tokens, **{CACHE: self.cache}),
            "other rows": lambda: self.model(tokens.repeat(2, 1), **{CACHE: self.cache}),
            "interrupt": lambda: self.model(tokens, **{CACHE: self.cache}),
            "other text": lambda: self.model.generate(**other, **call),
            "no cache": lambda: self.model.generate(**prompts, use_cache=False, **call),
        }
        kind = self.rng.choice(list(kinds))
        if "disabled" in kind:
            fd.disable(self.model)
        hook = self.model.model.layers[1].register_forward_pre_hook(interrupt) if kind == "interrupt" else None
        # RuntimeError: stock transformers slices prompts that are shorter than the padded length to nothing.
        with pytest.raises((ValueError, AttributeError, RuntimeError, KeyboardInterrupt)), torch.no_grad():
            kinds[kind]()
        if hook is not None:
            hook.remove()
        fd.enable(self.model)

    def generate(self):
        """A call over some rows, with more tokens or none; its cache may be kept."""
        rows = sorted(self.rng.sample(range(len(self.rows)), self.rng.randint(1, len(self.rows))))
        more = self.rng.choice([0, 1, 4, 30])
        prompts = [self.rows[row] + self.ids(more and self.rng.randint(1, more)) for row in rows]
        count = self.rng.randint(1, MOST_ROWS // len(prompts))
        arguments = {"do_sample": True, "top_k": 0, "max_new_tokens": self.rng.randint(1, 5)}
        arguments |= {"num_return_sequences": count, "return_dict_in_generate": True}
        seed = self.rng.randrange(1000)
        torch.manual_seed(seed)
        fd.disable(self.model)
        stock = self.model.generate(**padded(prompts), **arguments).sequences
        fd.enable(self.model)
        torch.manual_seed(seed)
        out = self.model.generate(**padded(prompts), **arguments, **{CACHE: self.cache})
        assert torch.equal(out.sequences, stock)
        assert fd.explain(self.model).last_call.nbytes.stored == out[CACHE].nbytes.stored
        self.check()
        if self.rng.random() < 0.7:
            new = [tokens.tolist()[-arguments["max_new_tokens"] : -1] for tokens in stock]
            self.rows = [prompts[index // count] + tail for index, tail in enumerate(new)]
            self.cache = out[CACHE]

    def check(self):
        """What the cache tells of itself is so."""
        fork = self.cache.fork()
        assert [fork.path_tokens(path).tolist() for path in fork.forest.paths] == self.rows
        assert self.cache.nbytes.allocated == held(self.cache)
        assert self.cache.get_seq_length() >= max(map(len, self.rows))


def interrupt(module, args):
    raise KeyboardInterrupt


def padded(rows):
    """Left-padded ids and their mask."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-window"])
def test_random_operations(name, seed):
    operate(tiny_model(name), random.Random(seed), 20)


def operate(model, rng, count):
    with fd.enabled(model):
        kept = Kept(model, rng)
        for _ in range(count):
            if max(map(len, kept.rows)) > MOST_TOKENS:
                kept = Kept(model, rng)
            operations = [kept.fork, kept.crop, kept.select, kept.reorder, kept.repeat, kept.forward, kept.refused]
            rng.choice([*operations, kept.drop_last, kept.forward, kept.generate, kept.generate])()
            kept.check()
