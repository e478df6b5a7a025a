"""Facts that no model can know, questions about them, and plain prose to hide them in (Hydragen, appendix D.3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

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
    """Something that stands in a text, and a question about it.

    Attributes:
        sentence: As it stands in the text.
        question: About it.
        answer: A word or a number of the sentence.
    """

    sentence: str
    question: str
    answer: str


def make_facts(count: int, seed: int) -> list[Fact]:
    """So many facts, each about a name of its own: colours of dogs, codes of lockers, villages.

    Args:
        count: Of facts; fewer are the first of more.
        seed: The same seed makes the same facts.
    """
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
    return (
        random.choice(_STARTS) + random.choice(_MIDDLES) + random.choice(_LINKS) + random.choice(ends)
    ).capitalize()


def make_prose(seed: int) -> Iterator[str]:
    """Sentences without end, which state nothing that is asked."""
    random = Random(seed)
    while True:
        choices = (_TIMES, _PEOPLE, _ACTIONS, _SIGHTS, _REMARKS)
        time, who, did, what, remark = (random.choice(words) for words in choices)
        yield f"{time} {who} {did} {what}{remark}."
