"""The languages whose programs can be checked."""

from __future__ import annotations

from typing import Final

from ..records import Language
from .java import JAVA
from .javascript import JAVASCRIPT
from .python import PYTHON
from .runner import LanguageSupport

LANGUAGES: Final[dict[Language, LanguageSupport]] = {
    "python": PYTHON,
    "java": JAVA,
    "javascript": JAVASCRIPT,
}
