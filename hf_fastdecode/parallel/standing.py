"""Where a process stands in its calls, as it tells its peers, and what follows from two such accounts.

Processes of a model run the same collectives and passes, which each of them counts. One that left a call by an error
is followed by the others if they leave calls at the same count, as all do at an error that they agree on or that every
call with these arguments raises; then the group can be used on. A process that goes beyond that count, or stays at it,
waits for its peer in vain.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Exit:
    """How a call was left.

    Attributes:
        count: The process's count then; an odd one within a pass, of whose collectives only some may have run.
        error: The error's class and text; None without one.
    """

    count: int
    error: str | None = None

    def matches(self, other: Exit) -> bool:
        """Whether neither process waits for the other: errors within a pass must be the same."""
        return self.count == other.count and (self.count % 2 == 0 or self.error == other.error)


_EXITS = 4
"""Exits that a process remembers, and as many by errors: the others are behind by one call at most."""


def remembered(*exits: Exit) -> tuple[Exit, ...]:
    """The last of these exits, and the last by errors, however many calls have ended well since.

    What is known of a peer is from its last heartbeat, between which there may be many short calls.
    """
    errors = [one for one in exits if one.error is not None][-_EXITS:]
    return tuple(one for one in exits if one in errors or one in exits[-_EXITS:])


@dataclass(frozen=True)
class Standing:
    """What one process tells the others.

    Attributes:
        beat: Increases with each heartbeat.
        in_call: Whether a call is in progress.
        recent: The last collectives, passes and calls that were begun, each with how many there were then.
        place: The part of the call, for errors.
        exits: How the last calls were left, the latest last.
        failed: The rank that failed, and its cause, if this process gave up the group.
        began: The count at which the last call began.
    """

    beat: int = 0
    in_call: bool = False
    recent: tuple[tuple[int, str], ...] = ()
    place: str = ""
    exits: tuple[Exit, ...] = ()
    failed: tuple[int, str] | None = None
    began: int = 0

    def to_text(self) -> str:
        return json.dumps(astuple(self))

    @classmethod
    def of_text(cls, text: bytes | str) -> Standing:
        beat, in_call, recent, place, exits, failed, began = json.loads(text)
        gave_up = None if failed is None else (failed[0], failed[1])
        begun = tuple((count, what) for count, what in recent)
        return cls(beat, in_call, begun, place, tuple(Exit(*one) for one in exits), gave_up, began)

    @property
    def count(self) -> int:
        """How many collectives, passes and calls were begun; see `Exit`."""
        return self.recent[-1][0] if self.recent else 0

    @property
    def error_exit(self) -> Exit | None:
        """The error by which the last call was left, until the next call begins."""
        last = self.exits[-1] if self.exits else None
        return last if last is not None and last.error is not None and not self.in_call else None

    def left_like(self, other: Exit) -> bool:
        """Whether this process left a call like another one did."""
        return any(one.matches(other) for one in self.exits)


def parted(mine: Standing, theirs: Standing) -> str | None:
    """Why a peer cannot take part in this process's call any more; None if nothing says so."""
    left = theirs.error_exit
    if left is not None and mine.count > left.count and not mine.left_like(left):
        return left.error
    if not mine.in_call:
        return None
    if any(one.error is None and mine.began <= one.count < mine.count for one in theirs.exits):
        return f"it ended a call in which another process began {mine.recent[-1][1]}"
    if theirs.in_call:
        begun, their_begun = dict(mine.recent), dict(theirs.recent)
        first, last = max(mine.recent[0][0], theirs.recent[0][0]), min(mine.count, theirs.count)
        for count in sorted(begun.keys() | their_begun.keys()):
            # A count that only one of them has, as passes have others than collectives, is followed by the other's.
            if first <= count <= last and begun.get(count) != their_begun.get(count):
                what, other = _next(their_begun, count), _next(begun, count)
                return f"it began {what} where another process began {other}"
    return None


def _next(begun: dict[int, str], count: int) -> str:
    """What was begun at a count, or else after it."""
    return begun[min(one for one in begun if one >= count)]


def waits_in_vain(mine: Standing, theirs: Standing) -> str | None:
    """The error by which a peer left where this process still is, in time for it to leave by the same; else None."""
    left = theirs.error_exit
    return left.error if left is not None and mine.in_call and mine.count == left.count else None


def settled(mine: Standing, theirs: Standing) -> bool | None:
    """Whether a peer left like this process, which left its last call by an error; None if that is not known yet."""
    left = mine.error_exit
    if left is None or theirs.left_like(left):
        return True
    return False if theirs.count > left.count or any(one.count == left.count for one in theirs.exits) else None
