"""Watching the calls of one module without a hook, since calls of a model with hooks run stock."""

from contextlib import contextmanager

from torch import nn


@contextmanager
def before_calls(module, run):
    """Within, `run(args, kwargs)` comes before each call of this module."""
    call = nn.Module.__call__

    def watched(self, *args, **kwargs):
        if self is module:
            run(args, kwargs)
        return call(self, *args, **kwargs)

    nn.Module.__call__ = watched
    try:
        yield
    finally:
        nn.Module.__call__ = call
