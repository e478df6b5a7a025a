"""Prefill attention over intervals of keys: soft caps, sliding windows and sinks, which fused operators leave out."""
