"""Tests of slim attention's mathematics."""
