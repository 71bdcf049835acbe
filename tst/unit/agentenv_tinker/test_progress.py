"""The lines that tell how a run is getting on."""

import asyncio
import json
import logging
import sys
from pathlib import Path

import pytest

from agentenv_tinker import progress


@pytest.mark.parametrize(
    ("metrics", "line"),
    [
        (
            {
                "progress/batch": 0,
                "test/env/all/reward/total": 0.1,
                "env/all/reward/total": 0.25,
                "optim/kl_sample_train_v1": 2e-6,
                "time/total": 61.4,
            },
            "step 1/4: held-out reward 0.100, reward 0.250, KL 2.0e-06, 61 s",
        ),
        ({"progress/batch": 3, "time/total": 5.0}, "step 4/4: every group failed; not trained, 5 s"),
        ({"test/env/all/reward/total": 0.5}, "final evaluation: held-out reward 0.500"),
    ],
    ids=["with an evaluation", "nothing trained", "after the last step"],
)
def test_a_step_is_one_line(metrics: dict[str, float], line: str) -> None:
    """A step's metrics are told in one line, those that are missing left out."""
    assert progress.step_line(metrics, 4) == line


async def test_steps_are_told_as_they_are_logged(tmp_path: Path) -> None:
    """A step is told once its line is whole, and only once."""
    told: asyncio.Queue[str] = asyncio.Queue()
    async with progress.told(tmp_path, steps=2, say=told.put_nowait), asyncio.timeout(10):
        with (tmp_path / "metrics.jsonl").open("w") as metrics:
            first = {"progress/batch": 0, "env/all/reward/total": 0.5, "optim/kl_sample_train_v1": 0}
            metrics.write(json.dumps(first) + "\n" + '{"progress/batch": 1')
            metrics.flush()
            assert await told.get() == "step 1/2: reward 0.500, KL 0.0e+00"

    assert told.empty()


def test_library_output_goes_to_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed within the block is in the log alone."""
    with progress.quiet_console(tmp_path / "console.log"):
        print("noise", file=sys.stderr)
        print("more noise")
    print("signal", file=sys.stderr)

    assert (tmp_path / "console.log").read_text() == "noise\nmore noise\n"
    assert capsys.readouterr().err == "signal\n"


def test_a_handler_made_meanwhile_does_not_outlive_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A library that logs after the block, as a teardown does, writes nothing to a closed file."""
    with progress.quiet_console(tmp_path / "console.log"):
        logging.getLogger().addHandler(logging.StreamHandler())
        logging.getLogger("library").warning("amid")
    logging.getLogger("library").warning("after")

    assert (tmp_path / "console.log").read_text() == "amid\n"
    assert capsys.readouterr().err == ""
