"""Sampling from logits without sorting them: filters, draw and log-probability of a row in one launch."""
