"""Slim attention in transformers' models.

Where to find what: `architectures` has a file per model type, `attention` computes a layer's attention, `values` makes
values of what is cached. Beside them stand the base classes of models (`decoder`, `encoder_decoder`), and the configs,
which `registration` registers with the Auto classes.
"""
