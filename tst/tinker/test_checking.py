"""A bundle checked with no model: what is told, and what is a problem."""

import json
from pathlib import Path

import pytest
from stand_in.bundles import helper_agent, task, write_bundle
from stand_in.model import MODEL, RENDERER

from agentenv_tinker.checking import Checked, check
from agentenv_tinker.errors import BundleError

RECIPE = f'model = "{MODEL}"\nrenderer = "{RENDERER}"\nsandbox = "in_process"\n'
TASKS = {
    "good": task("Write 1."),
    "other": task("Write 2."),
    "two-scores": task("Write 1.", scores=("first", "second")),
    "silent": task(agent=helper_agent()),
    "mute": task(agent=helper_agent()),
}
TWO_SCORES = "it records a score at each of 'first', 'second'; name the one that is its reward with reward=<step id>"
DEMONSTRATION = json.dumps({"task": "good", "calls": []}) + "\n"


@pytest.fixture
def bundle(tmp_path):
    """A bundle that can be trained on."""
    evals = {"train": ["good"], "held_out": ["other"], "odd": ["two-scores"]}
    root = Path(write_bundle(tmp_path / "b", TASKS, evals=evals))
    (root / "recipe.toml").write_text(RECIPE)
    (root / "demonstrations.jsonl").write_text(DEMONSTRATION)
    return root


def test_a_bundle_that_can_be_trained_on_has_no_problem(bundle):
    """What a run would leave out is told with its reason, and the recipes and demonstrations are counted."""
    (bundle / "quick.toml").write_text(RECIPE + "steps = 1\n")
    (bundle / "aliases.toml").write_text("")

    checked = check(str(bundle))

    silent = checked.left_out["silent"]
    assert checked == Checked(
        splits={"all": 3, "held_out": 1, "odd": 1, "train": 1},
        left_out={"mute": silent, "silent": silent},
        unscored={"two-scores": TWO_SCORES},
        recipes=("quick", "recipe"),
        demonstrations=1,
        problems=(),
    )
    assert list(checked.lines()) == [
        "tasks:          all 3, held_out 1, odd 1, train 1",
        "recipes:        quick, recipe",
        "demonstrations: 1",
        f"left out:       tasks 'mute', 'silent': {silent}",
        f"no reward:      task 'two-scores': {TWO_SCORES}",
    ]


def test_every_problem_is_told_at_once(bundle):
    """Of recipes, splits and demonstrations, each with its file."""
    (bundle / "recipe.toml").write_text(RECIPE + 'train_split = "odd"\neval_split = "none"\nwarm_start_steps = 1\n')
    (bundle / "typo.toml").write_text('stepz = 1\nsteps = "many"\n')
    (bundle / "zero.toml").write_text("steps = 0\n")
    lines = [DEMONSTRATION, "{}\n", "no\n", '{"task": "gone", "calls": []}\n']
    (bundle / "demonstrations.jsonl").write_text("".join(lines))

    checked = check(str(bundle))

    path = bundle / "demonstrations.jsonl"
    assert checked.demonstrations == 2
    assert checked.problems == (
        f"recipe '{bundle}/typo.toml': there is no setting 'stepz'; did you mean 'steps'?",
        f"recipe '{bundle}/typo.toml': steps must be a whole number, not \"many\"",
        f"recipe '{bundle}/zero.toml': steps must be 1 or more, not 0",
        f"task 'two-scores' of split 'odd' makes no reward: {TWO_SCORES}",
        "there is no split 'none'; the splits are 'all', 'held_out', 'odd', 'train'",
        f"{path}, line 2: task must be a text, not null",
        f"{path}, line 3: Expecting value: line 1 column 1 (char 0)",
        f"{path}: the bundle has no task 'gone'",
    )


def test_a_bundle_that_cant_be_prepared_has_its_other_files_checked_too(bundle):
    """The framework's own problems come with the others."""
    (bundle / "tasks" / "good.json").write_text("{")
    (bundle / "tasks" / "other.json").write_text("[]")
    (bundle / "demonstrations.jsonl").write_text("no\n")

    checked = check(str(bundle))

    assert checked.splits == {}
    assert [problem for problem in checked.problems if "tasks/good.json" in problem]
    assert checked.problems[-1].startswith(f"{bundle / 'demonstrations.jsonl'}, line 1: ")


def test_demonstrations_that_a_recipe_needs_must_be_there(bundle):
    """A warm start with no file would end the run."""
    (bundle / "demonstrations.jsonl").unlink()
    (bundle / "recipe.toml").write_text(RECIPE + "warm_start_steps = 1\n")

    [problem] = check(str(bundle)).problems

    assert problem.startswith(f"the demonstrations '{bundle}/demonstrations.jsonl' can't be read: ")


def test_what_is_no_bundle_is_refused():
    """There is nothing to report on."""
    with pytest.raises(BundleError, match="bundle 'none-such': 'none-such' is neither a folder nor an installed"):
        check("none-such")
