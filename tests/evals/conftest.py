"""Sandboxes that tests of evaluations run in."""

from __future__ import annotations

import pytest

from hf_fastdecode.evals.sandbox import Sandbox, SandboxError, choose


@pytest.fixture(scope="session", params=["bwrap", "unshare", "podman", "docker"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """Every back end that isolates on this machine."""
    try:
        return choose(request.param)
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def any_sandbox() -> Sandbox:
    """The back end that `auto` chooses."""
    try:
        return choose()
    except SandboxError as error:
        pytest.skip(str(error))
