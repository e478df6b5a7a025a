"""Several processes that compute together: which they are, how they agree, and contexts that they divide.

- `groups`: the processes between which a model's parameters are split, as by tensor parallelism, or contexts divided.
- `agreement`: what these processes decide together, and how a difference between their calls is named.
- `shards`, `sequence`: which rank stores which tokens of a divided context (Tree Attention).
- `divided_pass`: which rank computes which tokens of a prefill pass.
- `merge`, `collectives`, `step_tables`: attention of all ranks, merged in every layer.
- `failure`: ends the calls of all when one fails. `heartbeat` exchanges where they stand, `standing` is what that
  means, and `abort` closes the communication of a group.

A process with a model of its own has no group, and agrees with itself at no cost.
"""
