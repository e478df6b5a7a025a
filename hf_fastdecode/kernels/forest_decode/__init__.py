"""Decode attention over a forest: every node read once for all its rows, suffixes, and the merge."""
