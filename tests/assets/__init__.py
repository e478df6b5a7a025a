"""Tests of the embedded model and tasks."""
