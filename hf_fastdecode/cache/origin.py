"""Which weights a cache's keys and values were made with."""

from __future__ import annotations

from weakref import ref

from torch import nn


class Origin:
    """A model as it was when it filled a cache.

    Parameters count their changes in place, as optimizers and `load_state_dict` make them; what goes through
    ``parameter.data`` or replaces a parameter is not counted.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module):
        self._model = ref(model)
        self._changes = _changes(model)

    def outdated(self, model: nn.Module) -> bool:
        """Whether this is the same model, and its weights have changed since."""
        return self._model() is model and _changes(model) != self._changes

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # of a copied or loaded cache nothing is known


def _changes(model: nn.Module) -> int:
    return sum(0 if parameter.is_inference() else parameter._version for parameter in model.parameters())
