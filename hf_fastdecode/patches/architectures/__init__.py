"""Slim models, one file per architecture."""
