"""Watching the calls of one module without a hook, since calls of a model with hooks run stock."""

import functools
from contextlib import contextmanager


@contextmanager
def before_calls(module, run):
    """Within, `run(args, kwargs)` comes before each call of this module's forward."""
    kind, forward = type(module), type(module).forward

    @functools.wraps(forward)
    def watched(self, *args, **kwargs):
        if self is module:
            run(args, kwargs)
        return forward(self, *args, **kwargs)

    kind.forward = watched
    try:
        yield
    finally:
        kind.forward = forward
