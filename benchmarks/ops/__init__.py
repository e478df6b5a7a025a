"""Attention of one decode step in one layer: cases, ways, check, time and table."""
