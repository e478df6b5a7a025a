"""What a user sees of the package's log lines: its name once, whoever formats them."""

from __future__ import annotations

import pytest

from .fresh_processes import run_fresh

WARN = "from hf_fastdecode.log import logger; logger.warning('%s rows wait', 3); logger.info('not shown')"
SET_UP = {
    "nothing": ("", "hf_fastdecode: 3 rows wait\n"),
    "basicConfig": ("import logging; logging.basicConfig(); ", "WARNING:hf_fastdecode:3 rows wait\n"),
    "a handler of the logger": (
        "import logging; logging.getLogger('hf_fastdecode').addHandler(logging.StreamHandler()); ",
        "3 rows wait\n",
    ),
    "none wanted": ("import logging; logging.lastResort = None; ", ""),
    "an own place": ("import logging, sys; logging.getLogger().addHandler(logging.StreamHandler(sys.stdout)); ", ""),
}


@pytest.mark.parametrize("case", SET_UP)
def test_lines_begin_with_the_name_once(case: str) -> None:
    before, expected = SET_UP[case]
    assert run_fresh(before + WARN).stderr == expected


def test_lines_of_every_module_have_it() -> None:
    """Loggers below the package's, too."""
    code = "import hf_fastdecode.log, logging; logging.getLogger('hf_fastdecode.evals.x').warning('none')"
    assert run_fresh(code).stderr == "hf_fastdecode: none\n"
