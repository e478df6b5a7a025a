"""Conversion to slim models: `fit` is the mathematics, `layers` the choice of caches, `sizes` what caches take."""
