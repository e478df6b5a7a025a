"""Workloads with shared context: many samples of many problems, many questions about one text."""
