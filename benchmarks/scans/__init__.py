"""Scans of many tokens into states, beside transformers' code and packages that replace it."""
