"""Recipes: which file, what it may hold, and that a run's own makes the run again."""

from pathlib import Path

import pytest

from agentenv_tinker.config import EvalConfig, RunConfig
from agentenv_tinker.errors import ConfigError
from agentenv_tinker.recipe import configured, find_recipe, write_recipe


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text("steps = 40\nlearning_rate = 1\nabove = [0.2, 1]\n")
    (tmp_path / "quick.toml").write_text("steps = 5\n")
    return tmp_path


def test_a_recipe_is_found_by_name_by_path_or_by_itself(bundle: Path) -> None:
    """A name is one of the bundle's files, a path any file, and nothing the bundle's own."""
    assert find_recipe(bundle, "") == bundle / "recipe.toml"
    assert find_recipe(bundle, "quick") == bundle / "quick.toml"
    assert find_recipe(bundle, str(bundle / "quick.toml")) == bundle / "quick.toml"
    assert find_recipe(bundle / "elsewhere", "") is None


def test_a_recipe_that_is_not_there_is_told_with_those_that_are(bundle: Path) -> None:
    """A mistyped name is answered with the bundle's recipes."""
    with pytest.raises(ConfigError, match=r"there is no recipe '.*/quik.toml'; the bundle's are: quick, recipe$"):
        find_recipe(bundle, "quik")


def test_an_option_comes_before_the_recipe_and_the_recipe_before_the_default(bundle: Path) -> None:
    """Each setting is taken from the first of the three that has it."""
    config = configured(RunConfig, bundle / "recipe.toml", {"bundle": "b", "steps": 7})

    assert (config.steps, config.learning_rate, config.group_size) == (7, 1.0, 4)
    assert config.above == (0.2, 1)


def test_each_command_takes_the_settings_that_it_has(bundle: Path) -> None:
    """The settings of training are no matter to an evaluation."""
    assert configured(EvalConfig, bundle / "recipe.toml", {"bundle": "b", "run": "r"}) == EvalConfig(
        bundle="b", run="r", above=(0.2, 1)
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stepz = 4", "there is no setting 'stepz'; did you mean 'steps'?"),
        ("[train]\nsteps = 4", "there is no setting 'train'; did you mean"),
        ('runs = "x"', "there is no setting 'runs'"),
        ("steps = 1.5", "steps must be a whole number, not 1.5"),
        ("steps = true", "steps must be a whole number, not true"),
        ('learning_rate = "low"', 'learning_rate must be a number, not "low"'),
        ("model = 3", "model must be a text, not 3"),
        ("eval_base = 1", "eval_base must be true or false, not 1"),
        ("above = 0.2", "above must be a list of numbers, not 0.2"),
        ("steps = ", "can't be read: Invalid value"),
    ],
    ids=["typo", "table", "folder", "fraction", "boolean", "text", "number", "flag", "list", "no TOML"],
)
def test_a_bad_recipe_is_told_with_the_file_and_the_setting(tmp_path: Path, text: str, told: str) -> None:
    """What is wrong in it names the file, the setting and the value found."""
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        configured(RunConfig, path, {"bundle": "b"})

    assert str(refused.value).startswith(f"recipe {str(path)!r}")
    assert told in str(refused.value)


def test_a_run_is_made_again_from_the_recipe_that_it_wrote(tmp_path: Path) -> None:
    """Every setting comes back as it was, but the run's own name and folder."""
    config = RunConfig(
        bundle="b", run="first", seed=3, above=(0.2,), learning_rate=1e-5, checkpoint='a "b"', eval_base=True
    )
    write_recipe(config, tmp_path / "recipe.toml")

    assert configured(RunConfig, tmp_path / "recipe.toml", {"run": "first"}) == config
