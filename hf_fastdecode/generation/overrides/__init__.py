"""Overrides of an enabled model's methods; `methods` lists them."""
