"""Experts of a mixture for a few rows: each chosen expert's weights are read once, at the rate of memory."""
