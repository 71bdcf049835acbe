"""The GridSim env: an MCP server on the AgentEnv protocol that holds one day and takes one schedule for it.

A task gives the day by the card's ``urn:gridsim:day/v1`` extension, the agent reads and answers it through the two
tools, and the verifier reads what came of it by ``data/get``. ``data/reset`` empties the env for its next day.
"""

from agentenv_protocol import (
    AgentEnvEnvironment,
    AgentEnvError,
    DataPart,
    environment_card,
    extension,
    get_data,
    reset_data,
    tool,
)
from battery import Day, best_schedule, describe, parse_schedule, profit

DAY_URI = "urn:gridsim:day/v1"


@environment_card(name="gridsim")
class GridSim(AgentEnvEnvironment):
    """One day at a time: none until the task gives it, and no schedule until the agent submits one."""

    def __init__(self) -> None:
        self._day: Day | None = None
        self._schedule: tuple[str, ...] | None = None

    @extension(DAY_URI, description="Start a day: its price in each block and its battery.")
    def set_day(self, prices: list, capacity: int, power: int, loss: int) -> None:
        try:
            day = Day(tuple(prices), capacity, power, loss)
        except ValueError as e:
            raise AgentEnvError("invalid_day", str(e)) from None
        self._day, self._schedule = day, None

    @tool(structured_output=False)
    def read_day(self) -> str:
        """Today's prices and battery."""
        return describe(self._current_day())

    @tool(structured_output=False)
    def submit_schedule(self, schedule: str) -> str:
        """Each block's price and buy, hold or sell."""
        day = self._current_day()
        if self._schedule is not None:
            raise AgentEnvError("already_submitted", "a schedule is in; only the first one counts")
        try:
            self._schedule = parse_schedule(day, schedule)
        except ValueError as e:
            raise AgentEnvError("invalid_schedule", str(e)) from None
        return "submitted"

    @reset_data
    def reset(self) -> None:
        """Forget the day and its schedule."""
        self._day = self._schedule = None

    @get_data
    def outcome(self) -> list[DataPart]:
        """The submitted schedule, or None, what it earned and what the day's best one earns, in cents."""
        day, schedule = self._current_day(), self._schedule
        return [
            DataPart(
                data={
                    "schedule": schedule and " ".join(schedule),
                    "profit": schedule and profit(day, schedule),
                    "best_profit": profit(day, best_schedule(day)),
                }
            )
        ]

    def _current_day(self) -> Day:
        if self._day is None:
            raise AgentEnvError("no_day", f"no day is set; a task sets one by {DAY_URI}")
        return self._day


if __name__ == "__main__":
    GridSim().serve()
