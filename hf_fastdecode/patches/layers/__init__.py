"""Shared parts of slim architectures: attention layers, cached tokens and values, and families as data."""
