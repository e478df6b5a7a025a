"""Cache subclasses that store the keys and values of transformers models."""
