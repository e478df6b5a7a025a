"""Overrides of an enabled model's methods, and switches that replace methods for the time of a pass."""
