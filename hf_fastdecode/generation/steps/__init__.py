"""Decode steps: eager, or captured in CUDA graphs."""
