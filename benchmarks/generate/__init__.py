"""Whole calls of `generate` and growing completions: cases, ways, check, time and table."""
