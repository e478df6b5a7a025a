"""Modules of a model whose code between matrix products is one of this package's kernels (`kernels.pointwise`).

A layer's norms, rotary embedding and gated activation are some thirty launches of PyTorch's operators, each of which
takes longer to start than to compute. `FusedModules` runs them in one launch each, for the time of a pass.

What a module computes is found by trying it: on random numbers it must give what one of the known forms gives, with
the same roundings. Other modules keep their own code.
"""
