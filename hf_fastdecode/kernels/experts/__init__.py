"""Mixtures of experts: for a few rows each chosen expert's weights are read once; for many, PyTorch's products."""
