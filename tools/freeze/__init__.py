"""Records what a fixed set of calls does; `python -m tools.freeze`."""
