"""Sandboxes that can fork, and a server of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_fastdecode.evals.sandbox import (
    ForkServer,
    Sandbox,
    SandboxError,
    choose,
)

from .forking import ANY


@pytest.fixture(params=["bwrap", "unshare"])
def forking(request: pytest.FixtureRequest) -> Sandbox:
    """Every sandbox that can fork."""
    try:
        sandbox = choose(request.param)
    except SandboxError as error:
        pytest.skip(str(error))
    if not sandbox.forks:
        pytest.skip("it cannot fork here")
    return sandbox


@pytest.fixture
def server(forking: Sandbox) -> Iterator[ForkServer]:
    with forking.fork_server(ANY) as found:
        yield found
