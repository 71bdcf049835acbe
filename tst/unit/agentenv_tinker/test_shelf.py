"""How many containers are started, for who waits and for who will."""

from concurrent.futures import Future

import pytest

from agentenv_tinker.sandboxes.host import Spec
from agentenv_tinker.sandboxes.shelf import Shelf


def shelf(**state) -> Shelf:
    made = Shelf(Spec("image", 1, ()))
    made.waiting.extend(Future() for _ in range(state.pop("waiting", 0)))
    for name, value in state.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("state", "missing"),
    [
        ({"waiting": 3}, 3),
        ({"waiting": 3, "starting": 1, "coming": 1}, 1),
        ({"peak": 4}, 0),
        ({"peak": 4, "recycles": True}, 4),
        ({"peak": 4, "recycles": True, "out": 3, "coming": 1}, 0),
        ({"peak": 4, "recycles": False, "out": 3}, 4),
        ({"peak": 4, "recycles": False, "out": 3, "starting": 3}, 1),
        ({"waiting": 1, "peak": 4, "recycles": True}, 1),
    ],
    ids=str,
)
def test_as_many_start_as_are_waited_for_and_then_as_were_out_at_once(state, missing):
    """Who waits comes first; ahead of demand, containers that come back count and those that are used up don't."""
    assert shelf(**state).missing(room=True) == missing


def test_without_room_only_those_waited_for_are_started():
    """Memory bounds what is started ahead alone."""
    assert shelf(peak=4, recycles=True).missing(room=False) == 0
    assert shelf(waiting=2).missing(room=False) == 2


def test_who_gave_up_is_not_waited_for():
    """A cancelled wait neither has a container started nor gets one."""
    made = shelf(waiting=2)
    first, second = made.waiting
    first.cancel()
    assert made.missing(room=True) == 1
    assert made.next_waiting() is second
    assert made.next_waiting() is None


def test_a_failed_start_pauses_those_ahead_of_demand():
    """Who waits is still served; a start that goes well ends the growth of the pauses."""
    made = shelf(peak=2, recycles=True)
    made.start_failed()
    assert made.missing(room=True) == 0
    made.waiting.append(Future())
    assert made.missing(room=True) == 1


def test_an_env_that_resets_badly_three_times_in_a_row_is_reset_no_more():
    """A clean reset in between starts the count anew."""
    made = shelf(recycles=True)
    for clean in (False, False, True, False, False):
        made.proved(clean=clean)
    assert made.recycles is True
    made.proved(clean=False)
    assert made.recycles is False
