"""Slim attention in transformers' models.

`architectures` has a file per model type, `layers` what they share. Beside them stand the base classes of models
(`decoder`) and the configs, which `registration` registers with the Auto classes.
"""
