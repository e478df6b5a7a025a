"""Fast decoding for Hugging Face Transformers where many sequences share context."""

from .api import disable, enable, enabled, explain, prefill
from .assets import load_embedded
from .cache.shared import SharedContextCache
from .generation.report import Report

__version__ = "0.1.0"

__all__ = ["Report", "SharedContextCache", "disable", "enable", "enabled", "explain", "load_embedded", "prefill"]
