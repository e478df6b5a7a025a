"""Conversion to slim models: `fit` is the mathematics, `layer_converter` the choice, `sizes` the bytes of caches."""
