"""Which back end is chosen, and that the proof sees what does not isolate."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hf_fastdecode.evals import sandbox as sandboxes
from hf_fastdecode.evals.sandbox import BACKENDS, Limits, Sandbox, SandboxError, backends, choose
from hf_fastdecode.evals.sandbox.backends import Unshare
from hf_fastdecode.evals.sandbox.launch import Backend, Launch, Unconfined, View, view_of


@dataclass(frozen=True)
class Edited:
    """A back end whose command line was changed.

    Attributes:
        backend: That makes the command line.
        edits: Text of an argument, and what stands for it.
        name: Of it.
    """

    backend: Backend
    edits: tuple[tuple[str, str], ...]
    name: str = "edited"

    def missing(self) -> str | None:
        return self.backend.missing()

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        launch = self.backend.launch(argv, view, limits)
        command = list(launch.command)
        for old, new in self.edits:
            assert any(old in word for word in command), old
            command = [word.replace(old, new) for word in command]
        return replace(launch, command=[word for word in command if word])


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What each back end is refused for, in place of the proof; all pass."""
    found: dict[str, str | None] = dict.fromkeys(BACKENDS)
    monkeypatch.setattr(sandboxes, "_refusal", found.__getitem__)
    return found


def test_auto_takes_the_first_that_passes_the_proof(refusals: dict[str, str | None]) -> None:
    assert choose().name == "bwrap"
    refusals["bwrap"] = "not installed"
    assert choose().name == "unshare"
    refusals["unshare"] = refusals["podman"] = "it reaches the network"
    assert choose().name == "docker"


def test_auto_never_falls_back_to_none(refusals: dict[str, str | None]) -> None:
    refusals.update(dict.fromkeys(BACKENDS, "it reaches the network"))
    with pytest.raises(SandboxError, match=r"bwrap: it reaches the network.*apt install bubblewrap") as error:
        choose(allow_unsafe=True)
    assert "\n" not in str(error.value)
    assert "none" not in str(error.value)


def test_the_refusal_names_what_denies_user_namespaces(
    refusals: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ubuntu 24.04 does by default: there, bubblewrap helps only once that is changed."""
    monkeypatch.setattr(sandboxes, "_SETTINGS", tmp_path)
    refusals.update(dict.fromkeys(BACKENDS, "Permission denied"))
    with pytest.raises(SandboxError, match=r"; install bubblewrap \(apt install bubblewrap\), or inside a container"):
        choose()
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "apparmor_restrict_unprivileged_userns").write_text("1\n")
    denied = r"denies the user namespaces .*kernel\.apparmor_restrict_unprivileged_userns is 1\): .*docker or podman"
    with pytest.raises(SandboxError, match=denied):
        choose()
    with pytest.raises(SandboxError, match=r"\(podman: Permission denied\); install bubblewrap"):
        choose("podman")


def test_a_named_back_end_is_used_or_refused(refusals: dict[str, str | None]) -> None:
    assert choose("podman").name == "podman"
    refusals["podman"] = "the limit on processes does not bind"
    with pytest.raises(SandboxError, match="podman: the limit on processes does not bind") as error:
        choose("podman")
    assert "bwrap:" not in str(error.value)
    with pytest.raises(ValueError, match="must be auto, bwrap, unshare, podman, docker, none, got 'chroot'"):
        choose("chroot")


def test_none_has_to_be_allowed() -> None:
    with pytest.raises(SandboxError, match="`allow_unsafe=True`"):
        choose("none")
    assert choose("none", allow_unsafe=True).name == "none"


def test_the_proof_is_made_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "prove", None)
    assert choose(sandbox.name) == sandbox


def test_without_isolation_the_proof_tells_each_escape() -> None:
    refusal = sandboxes.prove(Unconfined())
    assert refusal is not None
    expected = ["network", "temporary folder", "outside its own folder", "more than its size", "processes of the host"]
    expected += ["keeps root or capabilities", "makes user namespaces"] if os.geteuid() == 0 else []
    expected += ["limit on processes"]
    assert [part for part in expected if part not in refusal] == []


@pytest.mark.parametrize(
    ("edits", "escape"),
    [
        ([("--net", "")], "it reaches the network"),
        ([("mount -o remount,bind,ro tmpfs /", "true")], "it writes outside its own folder"),
        ([("size=1048576", "size=8m")], "its own folder takes more than its size"),
        ([("--no-new-privs", "")], "it keeps root or capabilities"),
        ([("echo 1 > /proc/sys/user/max_user_namespaces", "true")], "it makes user namespaces"),
        ([("--nproc=16:16", "--nproc=64:64")], "the limit on processes does not bind"),
        ([("--data=1073741824:1073741824", "--data=4294967296:4294967296")], "the limit on memory does not bind"),
    ],
)
def test_each_hole_is_seen_alone(edits: list[tuple[str, str]], escape: str) -> None:
    if refusal := sandboxes._refusal("unshare"):
        pytest.skip(refusal)
    assert sandboxes.prove(Edited(Unshare(), tuple(edits))) == escape


def test_a_back_end_that_does_not_start_is_refused() -> None:
    if refusal := sandboxes._refusal("unshare"):
        pytest.skip(refusal)
    absent = str(sandboxes.prove(Edited(Unshare(), (("setpriv", "no-such-program"),))))
    assert "no-such-program cannot be started" in absent or "no-such-program: not found" in absent
    assert "mount: /tmp/hf-fastdecode-" in str(
        sandboxes.prove(Edited(Unshare(), (("mount -t proc", "mount -t nosuchfs"),)))
    )


def test_a_mount_point_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "Path", lambda path: tmp_path / Path(path).name)
    point = backends.mount_point.__wrapped__("root")
    assert point.stat().st_mode & 0o777 == 0o755
    point.rmdir()
    point.symlink_to("/etc")
    with pytest.raises(SandboxError, match="is no folder of user"):
        backends.mount_point.__wrapped__("root")


@pytest.mark.parametrize("path", [Path("relative"), Path("/nosuch"), Path("/"), Path("/proc"), Path.home()])
def test_what_may_not_be_shown(path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(path))):
        view_of((path,))


def test_packages_are_hidden_unless_asked_for(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    package = packages / "package"
    package.mkdir(parents=True)
    view = view_of((tmp_path / "lib",))
    assert tmp_path / "lib" in view.readable
    assert packages in view.hidden
    assert package not in view.readable
    with_package = view_of((tmp_path / "lib", package))
    assert {tmp_path / "lib", package} <= set(with_package.readable)
