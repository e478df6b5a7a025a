"""Conversion of attention layers: calibration, choice of a cache, and tensors of the slim layers."""
