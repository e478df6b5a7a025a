"""A long text with facts that no model can know, and questions about them (Hydragen, section 4.3, appendix D.3)."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Final

from hf_fastdecode.errors import InputError

MOST_FACTS: Final = 256
"""Facts that are asked about, as in the paper; with more questions, they come again."""

_PARAGRAPH: Final = 6  # sentences
_TASK: Final = "Answer the questions about the text above.\n\n"

_STARTS: Final = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s st t tr v w z".split()
_MIDDLES: Final = "a e i o u ai ea oa".split()
_LINKS: Final = "l ll m n nd r rn s st th v x".split()
_NAME_ENDS: Final = "a an en ia in is o on or us".split()
_PLACE_ENDS: Final = "burg by ford ham holm mere stead ton wick worth".split()
_COLOURS: Final = "amber black blue brown copper cream crimson gold green grey indigo ivory".split()
_COLOURS_TOO: Final = "lilac olive orange pink purple red silver tan teal violet white yellow".split()

_TIMES: Final = ("Early in the day", "In the evening", "After the rain", "Before noon", "In the autumn", "At dusk")
_PEOPLE: Final = (
    *("an old miller", "the postman", "a young teacher", "two fishermen", "the gardener", "a tired traveller"),
    *("the bell ringer", "some children", "a quiet woman", "the carpenter"),
)
_ACTIONS: Final = (
    *("walked slowly past", "stopped to rest beside", "told a long story about", "looked for a while at"),
    *("carried a basket to", "waited for the others near", "spoke with a friend about", "went back to"),
)
_SIGHTS: Final = (
    *("the stone bridge", "the empty market", "the mill by the river", "a field of barley", "the harbour wall"),
    *("the long road to the hills", "an orchard", "the town square", "the last house of the street"),
)
_REMARKS: Final = ("", ", and nobody minded", ", as on most days", ", while the wind rose", ", and then went home")


@dataclass(frozen=True)
class Fact:
    """A sentence of a text, a question about it, and the answer, a word or a number of the sentence."""

    sentence: str
    question: str
    answer: str


@dataclass(frozen=True)
class LongDocument:
    """A text and solved questions, which begin all rows, and the facts to ask about, at least one."""

    prefix: str
    facts: tuple[Fact, ...]

    def prompt(self, fact: Fact) -> str:
        return self.prefix + _asked(fact)


def make_document(count: Callable[[str], int], tokens: int, *, shots: int = 5, seed: int = 0) -> LongDocument:
    """Hide facts evenly in prose, so that text and solved questions together have nearly so many tokens, never more.

    At most half of the tokens are facts, and at most `MOST_FACTS` are asked about, none of those in the `shots` solved
    questions. The same seed makes the same facts, order and prose. `count` gives the tokens of a text.

    Raises InputError where there is no capacity for the solved questions and a fact to ask about.
    """
    facts = make_facts(MOST_FACTS + shots, seed)
    solved = _TASK + "".join(f"{_asked(fact)} {fact.answer}\n\n" for fact in facts[:shots])
    pieces = _made_pieces(count, tokens, seed)
    lengths = list(accumulate(count(fact.sentence + " ") for fact in facts))
    facts = facts[: bisect.bisect_right(lengths, (tokens - count(solved)) // 2)]
    if len(facts) <= shots:
        raise InputError(
            f"`tokens={tokens}` leave no room for {shots} solved questions and a fact to ask about, which take about "
            f"{count(solved) + 2 * lengths[shots]} tokens; ask for more, or for fewer `shots`"
        )
    order = Random(seed).sample(facts, len(facts))

    def prefix(length: int) -> str:
        return f"{_interleaved(pieces[:length], order).strip()}\n\n{solved}"

    fitting = bisect.bisect_right(range(len(pieces) + 1), tokens, key=lambda length: count(prefix(length))) - 1
    return LongDocument(prefix(max(0, fitting)), tuple(facts[shots:]))


def is_right(answer: str, fact: Fact) -> bool:
    """Whether the first line of a generated text is the answer, but for case and a full stop."""
    lines = answer.strip().splitlines()
    return bool(lines) and lines[0].strip().rstrip(".").casefold() == fact.answer.casefold()


def _asked(fact: Fact) -> str:
    return f"Question: {fact.question}\nAnswer:"


def _made_pieces(count: Callable[[str], int], tokens: int, seed: int) -> list[str]:
    """Sentences of at least so many tokens, with the white space after them."""
    pieces: list[str] = []
    total, prose = 0, make_prose(seed)
    while total < tokens:
        sentence = next(prose)
        pieces.append(sentence + ("\n\n" if len(pieces) % _PARAGRAPH == _PARAGRAPH - 1 else " "))
        total += count(sentence)
    return pieces


def _interleaved(pieces: Sequence[str], facts: Sequence[Fact]) -> str:
    parts = list(pieces)
    for number in reversed(range(len(facts))):  # from the end, so that places before stay
        parts.insert(round((number + 1) * len(pieces) / (len(facts) + 1)), facts[number].sentence + " ")
    return "".join(parts)


def make_facts(count: int, seed: int) -> list[Fact]:
    """So many facts, each about a name of its own; of the same seed, fewer are the first of more."""
    random = Random(seed)
    names: dict[str, None] = {}
    facts: list[Fact] = []
    while len(facts) < count:
        name = _word(random, _NAME_ENDS)
        if name in names:
            continue
        names[name] = None
        facts.append((_dog, _locker, _village)[len(facts) % 3](name, random))
    return facts


def _dog(name: str, random: Random) -> Fact:
    colour = random.choice([*_COLOURS, *_COLOURS_TOO])
    return Fact(
        f"The dog named {name} has fur that is {colour}.",
        f"What colour is the fur of the dog named {name}?",
        colour,
    )


def _locker(name: str, random: Random) -> Fact:
    code = str(random.randrange(1000, 10000))
    return Fact(f"The locker of {name} opens with the code {code}.", f"Which code opens the locker of {name}?", code)


def _village(name: str, random: Random) -> Fact:
    place = _word(random, _PLACE_ENDS)
    return Fact(f"A cousin of {name} lives in {place}.", f"Where does a cousin of {name} live?", place)


def _word(random: Random, ends: list[str]) -> str:
    return "".join(map(random.choice, (_STARTS, _MIDDLES, _LINKS, ends))).capitalize()


def make_prose(seed: int) -> Iterator[str]:
    """Sentences without end, which state nothing that is asked."""
    random = Random(seed)
    while True:
        choices = (_TIMES, _PEOPLE, _ACTIONS, _SIGHTS, _REMARKS)
        time, who, did, what, remark = (random.choice(words) for words in choices)
        yield f"{time} {who} {did} {what}{remark}."
