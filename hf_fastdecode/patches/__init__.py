"""Architectures with slim attention: a model class per family, and what all families share."""
