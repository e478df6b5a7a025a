"""Decode attention over a slim cache: scores, and averages of the cached keys, of one decode step."""
