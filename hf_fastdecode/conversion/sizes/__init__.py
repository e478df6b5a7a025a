"""Bytes that caches take and that a step reads, from configs alone (Slim attention, table 2 and section 7)."""
