"""GPU kernels: one folder an operator, each with its interface, its schedule and its Triton code."""
