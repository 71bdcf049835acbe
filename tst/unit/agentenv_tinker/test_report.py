"""The page of a run: what it says, of a whole run and of every unfinished one."""

import asyncio
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentenv_tinker.errors import ConfigError
from agentenv_tinker.report import FILE_NAME, reported, write_report

from .runs import evaluated, record, write_lines, write_run


def text_of(page: str) -> str:
    """What the page shows, as one line."""
    parts: list[str] = []

    class Reader(HTMLParser):
        def handle_data(self, data: str) -> None:
            parts.append(data)

    Reader().feed(page)
    return re.sub(r"\s+", " ", " ".join(parts))


def test_the_page_of_a_finished_run_says_what_it_came_to(tmp_path: Path) -> None:
    """Each evaluation, what RL changed on the same tasks, where the time went, and what failed."""
    shown = text_of(write_report(write_run(tmp_path / "r")).read_text())
    assert "finished, 2 steps" in shown
    assert "the base model 0.000 ± 0.000 0.0 % 0.0 % 0.0 % 0.0 % 0.0 % 2 0" in shown
    assert "after step 0 0.375 ± 0.125 100.0 %" in shown
    assert "after the last step 0.625 ± 0.375 100.0 % 50.0 % 0.0 % 0.0 % 0.0 % 2 1" in shown
    assert "on the 2 tasks that both evaluations scored: +0.250" in shown
    assert "1 tasks better, 1 worse, 0 the same" in shown
    assert "60.0 % training, 0.0 % sampling, 0.0 % env, 40.0 % other" in shown
    assert "final never-scored" in shown
    assert "torch 2" in shown


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    """No script, style, font or picture of another file; only the explorer's links lead out, to this machine."""
    page = write_report(write_run(tmp_path / "r")).read_text()
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert {link for link in links if not link.startswith("#")} == {
        f"http://127.0.0.1:8234/api/v1/tasks/id-{task}/run-groups?limit=200" for task in ("h1", "t1")
    }
    assert "<script" not in page
    assert "@import" not in page


def test_what_a_model_wrote_is_shown_and_never_run(tmp_path: Path) -> None:
    """A rollout's text is text."""
    folder = write_run(tmp_path / "r")
    said = [{"prompt": "<b>Go</b>", "assistant_content": "<script>alert(1)</script>", "tool_call_0": "f({})"}]
    said[0]["tool_result_0"] = "</pre><img src=x>"
    worst, best = record("t1", 0.0, said=said), record("t1", 1.0)
    write_lines(folder / "iteration_000001" / "train_rollout_summaries.jsonl", [worst, best])
    page = write_report(folder).read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "prompt <b>Go</b> model <script>alert(1)</script> call f({}) answer </pre><img src=x>" in text_of(page)


def test_the_rollouts_side_by_side_are_those_that_differ_the_most(tmp_path: Path) -> None:
    """The held-out task that gained most since the first evaluation, that which lost, and a group's best and worst."""
    folder = write_run(tmp_path / "r")
    evaluated(folder, "base", 0, {"h1": 0.0, "h2": 0.5})
    shown = text_of(write_report(folder).read_text())
    assert "gained the most: h1 The base model 0.000" in shown
    assert "After the last step 1.000" in shown
    assert "lost the most: h2 The base model 0.500" in shown
    assert "One group of step 1: t1 Its worst 0.250" in shown
    assert "r/train/step-0 , run 0-0.5" in shown
    assert "Its best 1.000" in shown
    assert "r/train/step-1 , run 1-1.0" in shown
    assert "r/eval/final/step-2 , run final-h1" in shown


@pytest.mark.parametrize("steps", [0, 1])
def test_an_unfinished_run_has_a_page_too(tmp_path: Path, steps: int) -> None:
    """Of what it has so far, in the midst of writing a line of metrics."""
    folder = write_run(tmp_path / "r", steps=steps)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"progress/ba')
    shown = text_of(write_report(folder).read_text())
    assert f"{steps} of 2 steps" in shown
    assert "after step 0 0.375" in shown
    assert "What RL changed" not in shown


def test_a_step_whose_every_group_failed_is_a_gap(tmp_path: Path) -> None:
    """It has no reward, and its failure shows."""
    folder = write_run(tmp_path / "r")
    (folder / "iteration_000001" / "train_rollout_summaries.jsonl").unlink()
    write_lines(folder / "metrics.jsonl", [{"progress/batch": 0, "time/total": 1.0}, {"progress/batch": 1}])
    assert "1 tasks trained on" in text_of(write_report(folder).read_text())


def test_a_run_that_has_played_nothing_yet_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "r", steps=0)
    for path in (folder / "evaluations").iterdir():
        path.unlink()
    assert "None yet." in text_of(write_report(folder).read_text())


def test_the_cost_is_by_the_prices_given(tmp_path: Path) -> None:
    """Dollars for a million tokens: of 4 rollouts and 6 episodes, 10 tokens read and 4 sampled each; 14 trained on."""
    folder = write_run(tmp_path / "r", token_prices=(1000.0, 10_000.0, 100_000.0))
    shown = text_of(write_report(folder).read_text())
    assert "100 read, 40 sampled, 56 trained" in shown
    assert "$6.10" in shown  # 0.1 + 0.4 + 5.6
    assert "$" not in text_of(write_report(write_run(tmp_path / "free")).read_text())


@pytest.mark.parametrize(
    ("left", "problem"),
    [(None, "is not the folder of a training run"), ('{"a": 1}', "another command than train"), ("{", "is not the")],
)
def test_another_folder_is_refused(tmp_path: Path, left: str | None, problem: str) -> None:
    """One without settings, with another command's, and with half of them."""
    if left is not None:
        (tmp_path / "run.json").write_text(left)
    with pytest.raises(ConfigError, match=problem):
        write_report(tmp_path)


def test_the_command_writes_the_page_anew_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from agentenv_tinker.cli import main

    folder = write_run(tmp_path / "r")
    monkeypatch.setattr(sys, "argv", ["agentenv-tinker", "report", str(folder)])
    main()
    assert capsys.readouterr().out == f"{folder / FILE_NAME}\n"
    assert (folder / FILE_NAME).exists()


async def test_the_page_follows_the_run(tmp_path: Path) -> None:
    """It is written anew when a step's metrics arrive, after what has to be done before."""
    folder = write_run(tmp_path / "r", steps=1)
    done: list[int] = []
    async with asyncio.timeout(60), reported(folder, before=lambda: done.append(1)):
        while not (folder / FILE_NAME).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert done == [1]
    assert "1 of 2 steps" in (folder / FILE_NAME).read_text()


async def test_a_page_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, with the reason."""
    folder = write_run(tmp_path / "r", steps=1)
    (folder / "evaluations" / "base.json").write_text(json.dumps({"not": "one"}))
    async with asyncio.timeout(60), reported(folder, before=lambda: None):
        while "could not be written" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "holds no evaluation" in caplog.text
    assert not (folder / FILE_NAME).exists()
