"""Conversion of checkpoints to slim ones and back, group of tensors by group, with a report."""
