"""What slim architectures share, as data: names of weights, RoPE, and how a layer runs."""
