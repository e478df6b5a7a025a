"""What follows from where two processes stand."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from hf_fastdecode.parallel import judge
from hf_fastdecode.parallel.failure import PeerWatch
from hf_fastdecode.parallel.standing import Exit, Standing, parted, remembered, settled, waits_in_vain


def test_standings_survive_the_store():
    for exits, failed in (((), None), ((Exit(4), Exit(7, "KeyError: 'x'")), (1, "no"))):
        standing = Standing(3, True, ((6, "a pass"), (8, "a comparison of 2")), "prefill", exits, failed)
        assert Standing.of_text(standing.to_text().encode()) == standing


def left(count: int, error: str | None, *earlier: Exit) -> Standing:
    return Standing(recent=((count, "a pass"),), exits=(*earlier, Exit(count, error)))


def in_call(count: int, *exits: Exit, doing: str = "a pass", began: int = 0) -> Standing:
    began = began or count
    return Standing(in_call=True, recent=((count - 2, "a pass"), (count, doing)), exits=exits, began=began)


@pytest.mark.parametrize(
    ("mine", "theirs", "error", "waits"),
    [
        pytest.param(in_call(8), in_call(8), None, None, id="same"),
        pytest.param(in_call(9), in_call(12), None, None, id="slower"),
        pytest.param(in_call(6), left(8, "E"), None, None, id="not-there-yet"),
        pytest.param(in_call(8), left(8, "E"), None, "E", id="where-it-left"),
        pytest.param(in_call(10), left(8, "E"), "E", None, id="beyond"),
        pytest.param(in_call(10), left(8, None), None, None, id="it-ended-the-call-before"),
        pytest.param(in_call(10, Exit(8, "E")), left(8, "E"), None, None, id="left-alike"),
        pytest.param(in_call(10, Exit(8, "F")), left(8, "E"), None, None, id="left-between-passes"),
        pytest.param(in_call(10, Exit(8)), left(8, "E"), None, None, id="error-after-the-last-pass"),
        pytest.param(in_call(10, Exit(7, "E")), left(7, "E"), None, None, id="left-alike-in-a-pass"),
        pytest.param(in_call(10, Exit(7, "F")), left(7, "E"), "E", None, id="left-a-pass-by-another-error"),
        pytest.param(in_call(12), in_call(10, Exit(8, "E")), None, None, id="an-error-that-was-settled"),
    ],
)
def test_what_a_peer_in_a_call_means(mine, theirs, error, waits):
    assert parted(mine, theirs) == error
    assert waits_in_vain(mine, theirs) == waits


def test_different_ways_are_told():
    compares = in_call(8, doing="a comparison of 2")
    assert parted(in_call(8), compares) == "it began a comparison of 2 where another process began a pass"
    assert parted(in_call(10), compares) == "it began a comparison of 2 where another process began a pass"
    assert parted(compares, in_call(10)) == "it began a pass where another process began a comparison of 2"
    assert parted(in_call(6), compares) is None
    assert parted(in_call(12), compares) is None


def test_a_collective_that_only_one_of_them_runs_is_told():
    passing, compares = in_call(9), in_call(10, doing="a comparison of 2")
    compares = replace(compares, recent=((7, "a pass"), *compares.recent[1:]))
    assert parted(passing, compares) == "it began a comparison of 2 where another process began a pass"
    assert parted(compares, passing) == "it began a pass where another process began a comparison of 2"
    assert parted(passing, replace(compares, recent=compares.recent[1:])) is None  # it may have forgotten


def test_a_call_that_a_peer_has_ended_is_not_gone_on_with():
    """Whatever the peer does since."""
    for peer in (left(8, None), in_call(14, Exit(8)), in_call(90, Exit(8))):
        assert parted(in_call(9, began=4), peer) == "it ended a call in which another process began a pass"
        assert parted(in_call(8, began=4), peer) is None


@pytest.mark.parametrize(
    ("theirs", "alike"),
    [
        pytest.param(left(8, "F"), True, id="alike"),
        pytest.param(left(10, "F", Exit(8, "E")), True, id="and-the-next-call-too"),
        pytest.param(in_call(8), None, id="still-there"),
        pytest.param(in_call(6), None, id="not-there-yet"),
        pytest.param(in_call(10), False, id="beyond"),
        pytest.param(left(10, None), False, id="ended-the-call"),
    ],
)
def test_a_process_that_left_by_an_error_waits_until_it_knows(theirs, alike):
    assert settled(left(8, "E"), theirs) is alike
    assert settled(left(8, None), theirs) is True
    assert settled(left(7, "E"), left(7, "F")) is False


def test_an_error_is_remembered_over_calls_that_end_well_since():
    """The peer, which left by it too, may not have told of later calls yet."""
    exits: tuple[Exit, ...] = (Exit(2, "D"), Exit(8, "E"))
    for count in range(10, 40, 2):
        exits = remembered(*exits, Exit(count))
    assert exits == (Exit(2, "D"), Exit(8, "E"), *map(Exit, range(32, 40, 2)))
    assert parted(in_call(40, *exits), left(8, "E", Exit(2, "D"))) is None
    assert len(remembered(*(Exit(count, "E") for count in range(20)))) == 4


def test_a_process_that_was_stopped_gets_time_to_leave_as_its_peer_did():
    group = mock.Mock(rank=lambda: 0, size=lambda: 2)
    with mock.patch.object(judge, "monotonic", return_value=0.0) as now:
        watch = PeerWatch([group], mock.Mock())
        watch._in_call, watch._heartbeat.peers, watch._heartbeat.silence = True, {1: left(1, "E")}, {1: 0.0}
        watch._advance("a pass", odd=True)

        def failed_at(seconds: float) -> tuple[int, str] | None:
            now.return_value = seconds
            with watch._news:
                watch._look_at_peers()
            return watch.failed

        assert [failed_at(seconds) for seconds in (0.2, 9.0, 9.2, 9.4)] == [None] * 4
        assert [failed_at(9.4 + 0.2 * look) for look in range(1, 5)][-1] == (1, "E")


def test_a_call_after_an_error_tells_for_whom_it_waits(caplog):
    """A process whose last call failed waits for those that were not in it yet, which need not ever be."""
    group = mock.Mock(rank=lambda: 0, size=lambda: 3)
    with mock.patch.object(judge, "monotonic", return_value=0.0) as now:
        watch = PeerWatch([group], mock.Mock())
        peers = watch._heartbeat.peers = {1: in_call(2), 2: Standing()}
        watch._heartbeat.silence = dict.fromkeys(peers, 0.0)
        watch._exits, watch._recent, watch._timeout, watch._entered = (Exit(4, "E"),), [(4, "a call")], 3.0, 0.0

        def wait(seconds: float) -> None:
            now.return_value += seconds
            if now.return_value > 9:
                peers.update(dict.fromkeys(peers, left(4, "E")))

        with mock.patch.object(watch._news, "wait", wait):
            watch._settle()
    assert watch.failed is None
    (told,) = caplog.messages
    assert "has waited 3 s for rank 2, which does not take part" in told


def test_a_process_that_is_slow_between_collectives_gets_time_to_raise_an_error_too():
    group = mock.Mock(rank=lambda: 0, size=lambda: 2)
    with mock.patch.object(judge, "monotonic", return_value=0.0) as now:
        watch = PeerWatch([group], mock.Mock())
        watch._in_call, watch._heartbeat.peers, watch._heartbeat.silence = True, {1: left(2, "E")}, {1: 0.0}
        watch._timeout = 4.0
        watch._advance("a comparison of 2")
        for look in range(30):
            now.return_value = 0.2 * look
            with watch._news:
                watch._look_at_peers()
            if look == 15:
                assert watch.failed is None
        assert watch.failed == (1, "E")


def test_where_a_process_stands_is_read_while_it_goes_on():
    """Another thread tells the peers; its error would end the heartbeat, and the process pass for a failed one."""
    watch = PeerWatch([mock.Mock(rank=lambda: 0, size=lambda: 2)], mock.Mock())
    for _ in range(100):
        told = iter(watch._recent)
        next(told)
        watch._advance("a pass")
        assert len(list(told)) <= 64
    assert [count for count, _ in watch._standing().recent] == list(range(74, 202, 2))
