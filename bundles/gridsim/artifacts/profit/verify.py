"""Scores a day by what the submitted schedule earned: this file is the whole reward.

    no schedule submitted        0
    otherwise                    0.2 + 0.8 * profit / best profit, and at least 0

So an idle battery scores 0.2, the day's best schedule 1, every other one in proportion to its profit, and one that
loses money less than 0.2. The env works the profits out (``envs/gridsim/battery.py``); every day's best one is above 0.
"""

from agentenv_protocol.client import get_data

IDLE_SCORE = 0.2


def score(profit: int | None, best_profit: int) -> float:
    """The reward of earning ``profit`` cents, None for no schedule, when the best one earns ``best_profit``."""
    if profit is None:
        return 0.0
    return max(0.0, IDLE_SCORE + (1 - IDLE_SCORE) * profit / best_profit)


async def verify(mcp_url: str) -> list[dict]:
    """One row, whose score the step takes as its own: its aggregator is ``weighted_average``."""
    answer = await get_data(mcp_url.removesuffix("/mcp"))
    outcome = answer.parts[0].data
    earned, best = outcome["profit"], outcome["best_profit"]
    return [
        {
            "id": "profit",
            "score": score(earned, best),
            "result": earned == best,
            "description": f"schedule {outcome['schedule']!r} earned {earned} of {best} cents",
        }
    ]
