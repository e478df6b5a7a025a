"""The query of one token per row rotated, and its key and V-coordinates appended to a slim cache."""
