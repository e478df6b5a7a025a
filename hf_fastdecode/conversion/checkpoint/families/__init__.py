"""Convertible architectures, one file each."""
