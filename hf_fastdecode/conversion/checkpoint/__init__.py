"""Conversion of models and checkpoints to slim ones and back; needs transformers, unlike the mathematics."""
