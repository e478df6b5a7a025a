"""The watches of all groups of processes that compute models, from a group's first call until it is destroyed."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from .failure import PeerWatch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_watches: WeakKeyDictionary[ProcessGroup, PeerWatch] = WeakKeyDictionary()
_made: Counter[str] = Counter()
"""Watches that were made, by name of the group, which a later group may have too, in the same store."""


def watch_of(groups: Sequence[ProcessGroup]) -> PeerWatch:
    """The watch of the first of a model's groups, the same one from its first call until the group is destroyed.

    Processes make the watches of groups of one name in the same order.
    """
    first = groups[0]
    found = _watches.get(first)
    if found is None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

        _register_ends()
        _made[first.group_name] += 1
        store = _get_process_group_store(first).clone()  # type: ignore[attr-defined]  # its own connection: on one, requests wait
        name = f"hf_fastdecode/{first.group_name}/{_made[first.group_name]}"
        found = _watches[first] = PeerWatch(groups, PrefixStore(name, store))
    else:
        found.also(groups)
    return found


def _end_all() -> None:
    for watch in list(_watches.values()):
        watch.end()


@cache
def _register_ends() -> None:
    """End threads before the interpreter, in whose last moments they must not run; and forget them in forks."""
    atexit.register(_end_all)
    os.register_at_fork(after_in_child=_watches.clear)
