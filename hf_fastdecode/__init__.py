"""Fast decoding for Hugging Face Transformers where many sequences share context."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .patches.registration import register_when_imported

if TYPE_CHECKING:
    from .api import disable, enable, enabled, explain, prefill
    from .assets import embedded_folder, load_embedded
    from .cache.shared import SharedContextCache
    from .conversion.sparsity import measure_sparsity
    from .conversion.to_slim import to_slim
    from .generation.decoding.sampling import TokenLogProbs
    from .generation.report import CallReport, Report
    from .generation.routing.choices import RouterChoices
    from .generation.routing.replay import replay_routing
    from .parallel.sequence import sequence_parallel_plan
    from .trainer_callback import FastDecodeCallback

__version__ = "0.2.0"

__all__ = [
    "CallReport",
    "FastDecodeCallback",
    "Report",
    "RouterChoices",
    "SharedContextCache",
    "TokenLogProbs",
    "disable",
    "embedded_folder",
    "enable",
    "enabled",
    "explain",
    "load_embedded",
    "measure_sparsity",
    "prefill",
    "replay_routing",
    "sequence_parallel_plan",
    "to_slim",
]

# torch and transformers take seconds to import, so the modules that define the names load when the first name is used.
_MODULES = {
    **dict.fromkeys(("CallReport", "Report"), "generation.report"),
    "FastDecodeCallback": "trainer_callback",
    "RouterChoices": "generation.routing.choices",
    "SharedContextCache": "cache.shared",
    "TokenLogProbs": "generation.decoding.sampling",
    "embedded_folder": "assets",
    "load_embedded": "assets",
    "measure_sparsity": "conversion.sparsity",
    "replay_routing": "generation.routing.replay",
    "sequence_parallel_plan": "parallel.sequence",
    "to_slim": "conversion.to_slim",
    **dict.fromkeys(("disable", "enable", "enabled", "explain", "prefill"), "api"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


register_when_imported()
