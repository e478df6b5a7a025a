"""Prompts: what they share, and its keys and values computed once."""
