"""Python imports this when it starts, in processes that a program under ``hf-fastdecode run`` starts."""

import importlib
import os
import sys


def _import_hidden() -> None:
    """Import the environment's `sitecustomize`, which this one hides."""
    folder, before = os.path.dirname(os.path.abspath(__file__)), sys.path[:]
    sys.path[:] = [path for path in before if os.path.abspath(path) != folder]
    hidden = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", hidden)
        sys.path[:] = [path for path in before if os.path.abspath(path) != folder]


_import_hidden()
try:
    from hf_fastdecode.enabled_loading import enable_in_child
except ModuleNotFoundError:  # another Python's environment
    print("hf-fastdecode: not installed for", sys.executable, file=sys.stderr)
else:
    enable_in_child()
