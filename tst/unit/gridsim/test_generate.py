"""The generator: its days, its splits, and that the committed files are what it makes."""

import itertools
import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def splits(generate):
    return generate.days_by_split()


def test_splits_have_their_sizes(splits):
    """There are 400 days to train on and 200 held out."""
    assert {split: len(days) for split, days in splits.items()} == {"train": 400, "held_out": 200}


def test_no_day_comes_twice(splits):
    """All 600 days differ, so no held-out day was trained on."""
    days = list(itertools.chain.from_iterable(splits.values()))
    assert len(set(days)) == len(days)


def test_every_day_can_earn_more_than_an_idle_battery(splits, battery):
    """The best schedule of each day earns at least three euros."""
    bests = [battery.profit(day, battery.best_schedule(day)) for day in itertools.chain(*splits.values())]
    assert min(bests) >= 300


def test_days_are_the_same_each_time(generate, splits):
    """Two runs of the generator make the same days."""
    assert generate.days_by_split() == splits


def test_no_fixed_schedule_does_well(generate, splits, battery, verify):
    """Without reading the day, the best that one schedule scores on the held-out days stays below one half."""
    days = [(day, battery.profit(day, battery.best_schedule(day))) for day in splits["held_out"]]
    means = [
        sum(verify.score(battery.profit(day, words), best) for day, best in days) / len(days)
        for words in itertools.product(battery.MOVES, repeat=len(generate.PRICES))
    ]
    assert max(means) < 0.5


def test_committed_files_are_what_the_generator_makes(bundle):
    """``generate.py --check`` finds nothing to change."""
    run = subprocess.run([sys.executable, bundle / "generate.py", "--check"], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_check_names_the_files_that_differ(generate, monkeypatch, tmp_path, capsys):
    """``--check`` names a changed, a missing and a surplus file, writes nothing and exits with 1."""
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    generate.main()
    (tmp_path / "tasks" / "train-007.json").write_text("[]")
    (tmp_path / "evals" / "held_out.toml").unlink()
    (tmp_path / "tasks" / "extra.json").write_text("[]")
    capsys.readouterr()

    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 1
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "evals/held_out.toml",
        "tasks/extra.json",
        "tasks/train-007.json",
    ]
    assert (tmp_path / "tasks" / "train-007.json").read_text() == "[]"


def test_a_second_run_repairs_what_differs(generate, monkeypatch, tmp_path):
    """Writing again puts a changed file back and removes a surplus one."""
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    generate.main()
    (tmp_path / "tasks" / "train-007.json").write_text("[]")
    (tmp_path / "tasks" / "extra.json").write_text("[]")
    generate.main()
    assert generate.stale_files(dict(generate.files())) == []


def test_demonstrations_earn_the_best_profit(bundle, splits, generate, battery):
    """There is one demonstration for each task: it reads the day and submits its best schedule."""
    lines = [json.loads(line) for line in (bundle / "demonstrations.jsonl").read_text().splitlines()]
    expected = [
        {
            "task": generate.task_name(split, index),
            "calls": [
                {"name": "read_day", "arguments": {}},
                {
                    "name": "submit_schedule",
                    "arguments": {"schedule": battery.write_schedule(day, battery.best_schedule(day))},
                },
            ],
        }
        for split, days in splits.items()
        for index, day in enumerate(days)
    ]
    assert lines == expected
