"""Decode attention over a slim cache: one read of the cached keys for scores and averages."""
