"""The battery: what a schedule earns, and that the best schedule is the best of all."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("prices", "capacity", "power", "loss", "schedule", "cents"),
    [
        pytest.param((2, 8), 1, 1, 0, "buy sell", 600, id="buys-and-sells"),
        pytest.param((2, 8), 1, 1, 25, "buy sell", 400, id="a-unit-sold-loses-a-quarter"),
        pytest.param((2, 8), 1, 1, 25, "hold hold", 0, id="idle-earns-nothing"),
        pytest.param((2, 8), 1, 1, 25, "buy hold", -200, id="what-is-left-is-worth-nothing"),
        pytest.param((8, 2), 1, 1, 0, "buy sell", -600, id="buys-dear-and-sells-cheap"),
        pytest.param((2, 8), 1, 1, 0, "sell sell", 0, id="an-empty-battery-sells-nothing"),
        pytest.param((2, 3, 8), 1, 1, 0, "buy buy sell", 600, id="a-full-battery-takes-nothing"),
        pytest.param((2, 8, 9), 3, 2, 0, "buy sell sell", 1200, id="moves-up-to-the-power-limit"),
        pytest.param((1, 2, 8), 3, 2, 0, "buy buy sell", 1200, id="buys-only-the-room-left"),
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
        pytest.param((2, 2, 8), 1, 1, 0, "hold buy sell", id="buys-as-late-as-it-can"),
        pytest.param((2, 8, 8), 1, 1, 0, "buy hold sell", id="sells-as-late-as-it-can"),
        pytest.param((3, 3, 3), 2, 1, 0, "hold hold hold", id="does-not-move-for-nothing"),
        pytest.param((8, 4, 2), 2, 1, 0, "hold hold hold", id="idle-where-nothing-can-be-earned"),
        pytest.param((4, 5), 1, 1, 20, "hold hold", id="idle-where-the-loss-eats-the-gain"),
        pytest.param((1, 2, 8, 9), 2, 1, 0, "buy buy sell sell", id="fills-over-two-blocks"),
        pytest.param((1, 2, 8, 9), 2, 2, 0, "buy hold hold sell", id="fills-in-one-block"),
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
    [
        "buy hold sell",
        "  buy  hold\nsell ",
        "buy, hold, sell",
        "Buy HOLD sell",
        "2 buy 3 hold 12 sell",
        "buy, 3 hold, sell",
    ],
    ids=["words", "spaces", "commas", "capitals", "prices", "some-prices"],
)
def test_a_schedule_is_read_in_any_spelling(battery, text):
    """Spaces, commas, capitals and the blocks' own prices make no difference to a schedule."""
    assert battery.parse_schedule(battery.Day((2, 3, 12), 1, 1, 0), text) == ("buy", "hold", "sell")


def test_a_written_schedule_is_read_back(battery):
    """A schedule written with its prices reads as the words it was made of."""
    day, words = battery.Day((2, 3, 12), 1, 1, 0), ("buy", "hold", "sell")
    text = battery.write_schedule(day, words)
    assert (text, battery.parse_schedule(day, text)) == ("2 buy 3 hold 12 sell", words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "got 0 words; send one for each of 3 blocks", id="empty"),
        pytest.param("buy sell", "got 2 words; send one for each of 3 blocks", id="too-few"),
        pytest.param(
            "hold hold hold hold", "'hold' comes after the last block; send one word for each of 3", id="too-many"
        ),
        pytest.param(
            "buy rest sell", "'rest' can't stand in block 2, whose price is 3; send buy, hold or sell", id="other-word"
        ),
        pytest.param(
            "2 buy 12 sell", "'12' can't stand in block 2, whose price is 3; send buy, hold or sell", id="other-price"
        ),
    ],
)
def test_a_malformed_schedule_is_refused(battery, text, message):
    """A malformed schedule says what is wrong with it and what to send instead."""
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (the whole message is compared)
        battery.parse_schedule(battery.Day((2, 3, 12), 1, 1, 0), text)
    assert str(refusal.value) == message
