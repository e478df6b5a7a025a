"""Checking JavaScript programs by node: each program in a sandbox of its own, and the tests in another.

`lodash.isequal` is lodash's `_.isEqual` as published on npm, with which MBXP's tests compare values.
"""

from .runner import JAVASCRIPT, JavaScriptRunner

__all__ = ["JAVASCRIPT", "JavaScriptRunner"]
