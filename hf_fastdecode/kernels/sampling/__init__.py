"""Sampling without a sort: filters, draw and log-probability of each row in one launch."""
