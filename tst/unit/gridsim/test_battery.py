"""The battery: what a schedule earns, and that the best schedule is the best of all."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("prices", "capacity", "power", "loss", "schedule", "cents"),
    [
        pytest.param((2, 8), 1, 1, 0, "charge sell", 600, id="buys-and-sells"),
        pytest.param((2, 8), 1, 1, 25, "charge sell", 400, id="a-unit-sold-loses-a-quarter"),
        pytest.param((2, 8), 1, 1, 25, "hold hold", 0, id="idle-earns-nothing"),
        pytest.param((2, 8), 1, 1, 25, "charge hold", -200, id="what-is-left-is-worth-nothing"),
        pytest.param((8, 2), 1, 1, 0, "charge sell", -600, id="buys-dear-and-sells-cheap"),
        pytest.param((2, 8), 1, 1, 0, "sell sell", 0, id="an-empty-battery-sells-nothing"),
        pytest.param((2, 3, 8), 1, 1, 0, "charge charge sell", 600, id="a-full-battery-takes-nothing"),
        pytest.param((2, 8, 9), 3, 2, 0, "charge sell sell", 1200, id="moves-up-to-the-power-limit"),
        pytest.param((1, 2, 8), 3, 2, 0, "charge charge sell", 1200, id="charges-only-the-room-left"),
    ],
)
def test_profit_of_a_schedule(battery, prices, capacity, power, loss, schedule, cents):
    """A schedule earns what its sales bring in after the loss, less what its purchases cost."""
    day = battery.Day(prices, capacity, power, loss)
    assert battery.profit(day, schedule.split()) == cents


days = st.tuples(
    st.lists(st.integers(0, 12), min_size=1, max_size=6).map(tuple),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 99),
)


@given(fields=days)
@settings(deadline=None)
def test_best_schedule_earns_as_much_as_the_best_of_all(battery, fields):
    """Dynamic programming finds the profit that trying every schedule finds."""
    day = battery.Day(*fields)
    every = itertools.product(battery.MOVES, repeat=len(day.prices))
    assert battery.profit(day, battery.best_schedule(day)) == max(battery.profit(day, words) for words in every)


@pytest.mark.parametrize(
    ("prices", "capacity", "power", "loss", "schedule"),
    [
        pytest.param((2, 2, 8), 1, 1, 0, "hold charge sell", id="charges-as-late-as-it-can"),
        pytest.param((2, 8, 8), 1, 1, 0, "charge hold sell", id="sells-as-late-as-it-can"),
        pytest.param((3, 3, 3), 2, 1, 0, "hold hold hold", id="does-not-move-for-nothing"),
        pytest.param((8, 4, 2), 2, 1, 0, "hold hold hold", id="idle-where-nothing-can-be-earned"),
        pytest.param((4, 5), 1, 1, 20, "hold hold", id="idle-where-the-loss-eats-the-gain"),
        pytest.param((1, 2, 8, 9), 2, 1, 0, "charge charge sell sell", id="fills-over-two-blocks"),
        pytest.param((1, 2, 8, 9), 2, 2, 0, "charge hold hold sell", id="fills-in-one-block"),
    ],
)
def test_best_schedule_of_several_equal_ones(battery, prices, capacity, power, loss, schedule):
    """The best schedule is one and the same: the one that holds for as long as it can."""
    assert battery.best_schedule(battery.Day(prices, capacity, power, loss)) == tuple(schedule.split())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(((), 1, 1, 0), "prices: expected 1 to 48 blocks, got 0", id="no-blocks"),
        pytest.param(((1,) * 49, 1, 1, 0), "prices: expected 1 to 48 blocks, got 49", id="too-many-blocks"),
        pytest.param(((1, -2), 1, 1, 0), "prices: expected whole numbers from 0 to 1000, got -2", id="price"),
        pytest.param(((1, "2"), 1, 1, 0), "prices: expected whole numbers from 0 to 1000, got '2'", id="price-type"),
        pytest.param(((1,), 0, 1, 0), "capacity: expected whole numbers from 1 to 1000, got 0", id="capacity"),
        pytest.param(((1,), 1, 1.5, 0), "power: expected whole numbers from 1 to 1000, got 1.5", id="power"),
        pytest.param(((1,), 1, 1, 100), "loss: expected whole numbers from 0 to 99, got 100", id="loss"),
        pytest.param(((1,), True, 1, 0), "capacity: expected whole numbers from 1 to 1000, got True", id="boolean"),
    ],
)
def test_a_day_out_of_range_is_refused(battery, fields, message):
    """A day that makes no sense says which field is wrong, what it holds and what it may hold."""
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the whole message is compared)
        battery.Day(*fields)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    "text",
    ["charge hold sell", "  charge  hold\nsell ", "charge, hold, sell", "Charge HOLD sell"],
    ids=["words", "spaces", "commas", "capitals"],
)
def test_a_schedule_is_read_whatever_its_spacing(battery, text):
    """Spaces, commas and capitals make no difference to a schedule."""
    assert battery.parse_schedule(text, blocks=3) == ("charge", "hold", "sell")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "got 0 words; send 3, one for each block", id="empty"),
        pytest.param("charge sell", "got 2 words; send 3, one for each block", id="too-few"),
        pytest.param("hold hold hold hold", "got 4 words; send 3, one for each block", id="too-many"),
        pytest.param("charge buy sell", "word 2 is 'buy'; each word must be charge, hold or sell", id="other-word"),
    ],
)
def test_a_malformed_schedule_is_refused(battery, text, message):
    """A malformed schedule says what is wrong with it and what to send instead."""
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the whole message is compared)
        battery.parse_schedule(text, blocks=3)
    assert str(refusal.value) == message
