"""Evaluation: checking completions, pass@k and its kin, workloads."""
