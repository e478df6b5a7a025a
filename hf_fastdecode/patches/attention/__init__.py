"""Attention of slim layers: what they compute in a forward pass, and at which positions."""
