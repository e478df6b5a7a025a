"""Attention by PyTorch's operators: decode over a forest, prefill, and the choice of a fused operator."""
