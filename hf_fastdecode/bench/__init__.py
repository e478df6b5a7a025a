"""Measurements: cases as data, one runner, rows that say where they come from."""
