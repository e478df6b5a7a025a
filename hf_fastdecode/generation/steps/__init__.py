"""A decode step: run eagerly, from a CUDA graph, or from a graph of compiled layers."""
