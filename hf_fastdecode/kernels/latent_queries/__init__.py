"""Queries of layers with latents, and what these store of a token, in one launch after their projections."""
