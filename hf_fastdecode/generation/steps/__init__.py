"""Decode steps: eager, CUDA graph, or CUDA graph of compiled layers."""
