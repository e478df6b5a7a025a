"""Several processes that compute together: which they are, how they agree, and contexts that they divide.

- `groups`: the processes between which a model's parameters are split, as by tensor parallelism, or contexts divided.
- `agreement`: what these processes decide together, and how a difference between their calls is named.
- `watchdog`: ends the calls of all when one fails, by heartbeats and an abort.
- `shards`, `sequence`: which rank stores which tokens of a divided context (Tree Attention), and decode steps over it.
- `divided_pass`: which rank computes which tokens of a prefill pass.
- `collectives`: tokens of all ranks gathered, and their attention merged.

A process with a model of its own has no group, and agrees with itself at no cost.
"""
