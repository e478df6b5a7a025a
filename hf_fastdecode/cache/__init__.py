"""Cache subclasses: what transformers' models write keys and values to."""
