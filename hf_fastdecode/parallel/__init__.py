"""Several processes that compute together: which they are, how they agree, and contexts that they divide.

- `ranks`: the processes between which a model's parameters are split or contexts divided, and their agreements.
- `watchdog`: ends the calls of all when one fails, by heartbeats and an abort.
- `shards`: which rank stores and computes which tokens of a divided context (Tree Attention), and gathers of these.
- `sequence`: decode steps over divided contexts, whose attention is merged, and a plan of weights beside them.
"""
