"""Kinds of layers of a shared-context cache, a file each."""
