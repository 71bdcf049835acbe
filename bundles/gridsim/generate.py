"""Writes this bundle's tasks, evals and demonstrations: the same bytes each time.

    python bundles/gridsim/generate.py            # write them
    python bundles/gridsim/generate.py --check    # exit 1, naming the files that differ

Every split draws from its own seeded stream. A day that was drawn before, in any split, is drawn again, so the splits
share no day; so is one whose best schedule earns less than MIN_BEST_PROFIT, which keeps the best well above idling.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

Option = TypeVar("Option")

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "envs" / "gridsim"))

from battery import Day, best_schedule, profit, write_schedule  # noqa: E402  (it lies in the env's build context)

SPLITS = {"train": (400, 20260101), "held_out": (200, 20260102)}
"""By eval: how many days it has, and the seed of its stream."""


def pool(*, cheap: int, fair: int, dear: int) -> tuple[int, ...]:
    """Prices to draw one of: 1 to 3, 4 to 6 and 7 to 9 euros, each as often as its weight says."""
    return (1, 2, 3) * cheap + (4, 5, 6) * fair + (7, 8, 9) * dear


PRICES = (
    pool(cheap=5, fair=2, dear=3),
    *(pool(cheap=4, fair=2, dear=4) for _ in range(3)),
    pool(cheap=2, fair=2, dear=6),
)
"""By block: what its price is drawn from. A day starts cheaper and ends dearer than it is between."""

BATTERIES = ((1, 1), (2, 1), (2, 2))
"""Capacity and power, in units."""

LOSSES = (10, 20, 30)
MIN_BEST_PROFIT = 300
"""In cents."""

SYSTEM_PROMPT = "You run a battery."
PROMPT = "Read the day, then submit the schedule that earns most."


def draw_day(stream: random.Random) -> Day:
    """A day that may earn nothing: keep it only if ``is_worth_playing``."""
    prices = tuple(pick(stream, prices) for prices in PRICES)
    capacity, power = pick(stream, BATTERIES)
    return Day(prices, capacity, power, pick(stream, LOSSES))


def pick(stream: random.Random, options: Sequence[Option]) -> Option:
    """One of ``options``, by ``random()`` alone: only its sequence is the same on every Python."""
    return options[int(stream.random() * len(options))]


def is_worth_playing(day: Day) -> bool:
    return profit(day, best_schedule(day)) >= MIN_BEST_PROFIT


def days_by_split() -> dict[str, list[Day]]:
    """Every split's days, no day twice."""
    seen: set[Day] = set()
    splits: dict[str, list[Day]] = {}
    for split, (count, seed) in SPLITS.items():
        stream, days = random.Random(seed), []
        while len(days) < count:
            day = draw_day(stream)
            if day not in seen and is_worth_playing(day):
                seen.add(day)
                days.append(day)
        splits[split] = days
    return splits


def task_name(split: str, index: int) -> str:
    return f"{split}-{index:03}"


def task_steps(day: Day) -> list[dict]:
    """The task in which an agent plays ``day``."""
    return [
        {"id": "env", "type": "deploy_env", "env_id": "gridsim"},
        {
            "id": "day",
            "type": "apply_server_config",
            "env_id": "gridsim",
            "directives": [{"environment": "gridsim", "uri": "urn:gridsim:day/v1", "args": asdict(day)}],
            "depends_on": ["env"],
        },
        {
            "id": "agent",
            "type": "deploy_agent",
            "env_ids": ["gridsim"],
            "system_prompt": SYSTEM_PROMPT,
            "depends_on": ["day"],
        },
        {"id": "plan", "type": "prompt_agent", "prompt": PROMPT, "depends_on": ["agent"]},
        {
            "id": "profit",
            "type": "env_outcome_verifier",
            "env_id": "gridsim",
            "file_artifact_id": "profit",
            "verifier_id": "profit",
            "score_aggregator": "weighted_average",
            "depends_on": ["plan"],
        },
    ]


def task_text(day: Day) -> str:
    """The task's file: a step to a line."""
    return "[\n" + ",\n".join("  " + json.dumps(step) for step in task_steps(day)) + "\n]\n"


def demonstration(split: str, index: int, day: Day) -> dict:
    """The calls that earn a task the score 1, for a warm start; the framework never reads them."""
    schedule = write_schedule(day, best_schedule(day))
    return {
        "task": task_name(split, index),
        "calls": [
            {"name": "read_day", "arguments": {}},
            {"name": "submit_schedule", "arguments": {"schedule": schedule}},
        ],
    }


def files() -> Iterator[tuple[Path, str]]:
    """Each generated file's path in the bundle, and its text."""
    demonstrations = []
    for split, days in days_by_split().items():
        names = [task_name(split, index) for index in range(len(days))]
        yield Path("evals", f"{split}.toml"), "tasks = " + json.dumps(names, indent=2) + "\n"
        for index, day in enumerate(days):
            yield Path("tasks", f"{names[index]}.json"), task_text(day)
            demonstrations.append(json.dumps(demonstration(split, index, day)))
    yield Path("demonstrations.jsonl"), "\n".join(demonstrations) + "\n"


def stale_files(generated: dict[Path, str]) -> list[Path]:
    """The files that --check complains of: those that differ or are missing, and task and eval files of no split."""
    on_disk = {path.relative_to(ROOT) for folder in ("tasks", "evals") for path in (ROOT / folder).glob("*")}
    differing = {path for path, text in generated.items() if not _holds(ROOT / path, text)}
    return sorted(differing | (on_disk - generated.keys()))


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the files on disk differ")
    options = parser.parse_args()
    generated = dict(files())
    stale = stale_files(generated)
    if options.check:
        for path in stale:
            print(f"{path}: differs from what generate.py makes; run it without --check", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        target = ROOT / path
        if path in generated:
            target.parent.mkdir(exist_ok=True)
            target.write_text(generated[path], encoding="utf-8")
        else:
            target.unlink()
    print(f"{len(generated)} files, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
