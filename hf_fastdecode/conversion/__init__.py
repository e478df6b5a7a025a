"""Conversion to slim checkpoints: `fit` is the mathematics, `checkpoint` the pipeline, `sizes` what caches take."""
