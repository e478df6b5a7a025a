"""Shared-prefix detection and prefill of prompts."""
