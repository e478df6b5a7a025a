"""Tests of checking and of pass@k."""
