"""Several processes that compute one model together: which they are, and how they agree.

- `groups`: the processes between which a model's parameters are split, as by tensor parallelism.
- `agreement`: what these processes decide together, and how a difference between their calls is named.
- `failure`: ends the calls of all when one fails. `heartbeat` exchanges where they stand, `standing` is what that
  means, and `abort` closes the communication of a group.

A process with a model of its own has no group, and agrees with itself at no cost.
"""
