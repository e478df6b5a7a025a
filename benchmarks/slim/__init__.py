"""Attention of one decode step over a slim cache: cases, time and table."""
