"""lm-evaluation-harness with an enabled model, from its own command line."""
