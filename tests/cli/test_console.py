"""The terminal side: libraries are silenced for a while, options take several numbers."""

import logging

import pytest
from huggingface_hub.utils import are_progress_bars_disabled
from transformers.utils import logging as transformers_logging

from hf_fastdecode.cli.console import progress_bar, quiet_libraries


def state() -> tuple[object, ...]:
    return (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
        are_progress_bars_disabled(),
        logging.getLogger("hf_fastdecode").level,
    )


@pytest.mark.parametrize("warnings", [False, True])
def test_libraries_are_quiet_and_then_as_before(warnings):
    before = state()
    with quiet_libraries(warnings=warnings), quiet_libraries(warnings=warnings):
        assert not transformers_logging.is_progress_bar_enabled()
        assert (transformers_logging.get_verbosity() == logging.ERROR) is not warnings
        assert not logging.getLogger("hf_fastdecode").isEnabledFor(logging.WARNING)
    assert state() == before


def test_libraries_are_as_before_after_an_error():
    before = state()
    with pytest.raises(RuntimeError), quiet_libraries():
        raise RuntimeError
    assert state() == before


def test_no_progress_where_stderr_is_no_terminal(capsys):
    with progress_bar("title", 3) as on_step:
        on_step(0)
    assert capsys.readouterr() == ("", "")
