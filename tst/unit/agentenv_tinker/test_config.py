"""The settings of a run."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from agentenv_tinker.config import RunConfig
from agentenv_tinker.errors import ConfigError


def test_a_run_is_named_after_its_bundle_and_the_time() -> None:
    """Without a name, a run is called by the bundle's folder and when it was made."""
    config = RunConfig(bundle="some/where/grid sim")

    assert re.fullmatch(r"grid-sim-\d{8}-\d{6}", config.run)
    assert config.folder == Path("runs") / config.run


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("steps", 0, "steps must be 1 or more, not 0"),
        ("group_size", -1, "group_size must be 1 or more, not -1"),
        ("max_concurrent_episodes", 0, "max_concurrent_episodes must be 1 or more, not 0"),
        ("eval_tasks", -1, "eval_tasks must be 0 or more, not -1"),
        ("learning_rate", 0.0, "learning_rate must be above 0, not 0.0"),
        ("temperature", float("nan"), "temperature must be above 0, not nan"),
        (
            "token_prices",
            (1.0, -1.0, 0.0),
            "token_prices must be three prices, for tokens read, sampled and trained on, not (1.0, -1.0, 0.0)",
        ),
        (
            "token_prices",
            (1.0,),
            "token_prices must be three prices, for tokens read, sampled and trained on, not (1.0,)",
        ),
        ("run", "../elsewhere", "run must be a plain name of letters, digits, '-', '_' and '.', not '../elsewhere'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_by_name(name: str, value: object, told: str) -> None:
    """A bad value is told with the setting's name and the value found."""
    with pytest.raises(ConfigError) as refused:
        RunConfig(bundle="b", **{name: value})

    assert str(refused.value) == told


def test_weights_and_biases_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts, with what to do."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentenv-tinker\[wandb\]'"):
        RunConfig(bundle="b", wandb_project="p")


def test_settings_are_saved_as_json_values() -> None:
    """Every setting is there, as a plain value that JSON holds."""
    saved = RunConfig(bundle="b", run="r", runs=Path("x"), above=(0.2,)).to_dict()

    assert json.loads(json.dumps(saved)) == {**saved, "above": [0.2], "sandbox_hosts": [], "token_prices": []}
    assert saved.keys() == {setting.name for setting in dataclasses.fields(RunConfig)}
    assert (saved["bundle"], saved["runs"], saved["steps"]) == ("b", "x", 3)
