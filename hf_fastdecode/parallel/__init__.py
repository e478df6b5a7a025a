"""Several processes that compute together: which they are, how they agree, and contexts that they divide.

- `groups`: the processes between which a model's parameters are split, as by tensor parallelism, or contexts divided.
- `agreement`: what these processes decide together, and how a difference between their calls is named.
- `shards`, `sequence`: which rank stores which tokens of a divided context (Tree Attention).
- `divided_pass`, `contexts`: which rank computes which tokens of a prefill pass, and earlier tokens gathered for it.
- `merge`, `collectives`, `step_tables`: attention of all ranks, merged in every layer.
- `plans`: weights split between the same processes, but for those of attention heads (Helix parallelism).
- `failure`: ends the calls of all when one fails, by a group's watch (`watches`; `unwatched` is that of one process).
  `heartbeat` exchanges where they stand, `standing` is what that means, `judge` finds which one has failed, and
  `abort` closes a group's communication.

A process with a model of its own has no group, and agrees with itself at no cost.
"""
