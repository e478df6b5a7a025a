"""The languages whose programs can be checked."""

from __future__ import annotations

from typing import Final

from ..task import Language
from .python import PYTHON
from .runner import LanguageSupport

LANGUAGES: Final[dict[Language, LanguageSupport]] = {
    "python": PYTHON,
}
