"""Decode attention over a forest: node kernel, suffix kernel, and merge."""
