"""JavaScript: programs and their tests by node, each in a process of its own.

`lodash.isequal` is lodash's `_.isEqual` as published on npm, which MBXP's tests compare values with.
"""

from .runner import JavaScriptRunner, missing_node

__all__ = ["JavaScriptRunner", "missing_node"]
