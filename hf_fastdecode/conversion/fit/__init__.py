"""Slim attention (Graef): caches of keys, keys with V-coordinates, or inputs, in the place of keys and values.

The mathematics of converting attention layers, in fp64; it imports PyTorch alone.
"""
