"""The shared-context implementation of `model.generate`: prompt trees, prefill, decode loop, stock fallback."""
