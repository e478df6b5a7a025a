"""Decoding over several GPUs: cases, ways, check, time and table, and a cost model for more GPUs than there are."""
