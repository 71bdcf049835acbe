"""A battery on a power grid for one day: what a schedule earns, and the best one there is.

Pure and standard library only: the env's server, the day generator and the tests share it. It knows nothing of
rewards; ``artifacts/profit/verify.py`` makes the score of these profits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_BLOCKS = 48
"""Half-hour blocks at the finest: a day of more is a mistake."""

MOVES = ("hold", "buy", "sell")
"""A schedule's words: leave the battery alone, charge it, discharge it. Their order breaks ties: see best_schedule."""


@dataclass(frozen=True)
class Day:
    """One day's prices and battery.

    The battery starts empty, and what is left in it when the day ends is worth nothing.
    """

    prices: tuple[int, ...]
    """Price of one unit of energy in each block, in euros; the same for buying and selling."""

    capacity: int
    """Units of energy the battery holds."""

    power: int
    """Units of energy it takes in or gives out in one block, at most."""

    loss: int
    """Percent of the energy sold that is lost on its way out, so that a unit sold earns (100 - loss) % of the price."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.prices) <= MAX_BLOCKS:
            raise ValueError(f"prices: expected 1 to {MAX_BLOCKS} blocks, got {len(self.prices)}")
        for name, values, low, high in (
            ("prices", self.prices, 0, 1000),
            ("capacity", (self.capacity,), 1, 1000),
            ("power", (self.power,), 1, 1000),
            ("loss", (self.loss,), 0, 99),
        ):
            for value in values:
                if type(value) is not int or not low <= value <= high:
                    raise ValueError(f"{name}: expected whole numbers from {low} to {high}, got {value!r}")


def describe(day: Day) -> str:
    """The day as an agent reads it."""
    prices = " ".join(map(str, day.prices))
    return f"prices: {prices}; battery: holds {day.capacity}, moves {day.power}, loses {day.loss}%"


def write_schedule(day: Day, schedule: Sequence[str]) -> str:
    """``schedule`` with each block's price before its word, which keeps what the word answers in sight."""
    return " ".join(f"{price} {word}" for price, word in zip(day.prices, schedule, strict=True))


def parse_schedule(day: Day, text: str) -> tuple[str, ...]:
    """The words of a schedule for ``day``, one for each block; a word may follow its block's price.

    Raises ValueError, saying what to send instead, when there are too few words or too many, or anything else is in it.
    """
    schedule: list[str] = []
    for part in text.lower().replace(",", " ").split():
        if len(schedule) == len(day.prices):
            raise ValueError(f"{part[:20]!r} comes after the last block; send one word for each of {len(day.prices)}")
        price = day.prices[len(schedule)]
        if part in MOVES:
            schedule.append(part)
        elif part != str(price):
            block = f"block {len(schedule) + 1}, whose price is {price}"
            raise ValueError(f"{part[:20]!r} can't stand in {block}; send buy, hold or sell")
    if len(schedule) < len(day.prices):
        raise ValueError(f"got {len(schedule)} words; send one for each of {len(day.prices)} blocks")
    return tuple(schedule)


def energy_moved(day: Day, *, level: int, word: str) -> int:
    """Units that ``word`` puts into (or, negative, takes out of) a battery holding ``level``: never more than the power
    limit, the room left or the energy held, so buying for a full battery and selling from an empty one do nothing."""
    if word == "buy":
        return min(day.power, day.capacity - level)
    if word == "sell":
        return -min(day.power, level)
    return 0


def earned(day: Day, *, price: int, units: int) -> int:
    """Cents that moving ``units`` at ``price`` euros brings in, or costs when units go into the battery."""
    return -100 * price * units if units > 0 else (100 - day.loss) * price * -units


def profit(day: Day, schedule: Sequence[str]) -> int:
    """Cents that ``schedule``, one word for each block, earns on ``day``; negative when it loses money."""
    level = total = 0
    for price, word in zip(day.prices, schedule, strict=True):
        units = energy_moved(day, level=level, word=word)
        level += units
        total += earned(day, price=price, units=units)
    return total


def best_schedule(day: Day) -> tuple[str, ...]:
    """The schedule that earns the most, by dynamic programming over blocks and battery levels.

    Of several it is the one that holds for as long as it can, and then the one that buys rather than sells.
    """
    best_from = [0] * (day.capacity + 1)  # by level: cents that the blocks after this one can still earn
    choices: list[list[str]] = []
    for price in reversed(day.prices):
        moves = [_best_move(day, price, level, best_from) for level in range(day.capacity + 1)]
        best_from = [cents for cents, _ in moves]
        choices.append([word for _, word in moves])
    level, schedule = 0, []
    for words in reversed(choices):
        schedule.append(words[level])
        level += energy_moved(day, level=level, word=words[level])
    return tuple(schedule)


def _best_move(day: Day, price: int, level: int, best_after: Sequence[int]) -> tuple[int, str]:
    options = []
    for word in MOVES:
        units = energy_moved(day, level=level, word=word)
        options.append((earned(day, price=price, units=units) + best_after[level + units], word))
    return max(options, key=lambda option: option[0])  # the first of equals
