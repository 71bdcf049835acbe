"""Checks a bundle with no model and no service: everything that keeps it from being trained on, found at once.

It asks what a run would ask, of each of the bundle's recipes. What a run only leaves out is told, and no problem.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentenv_tinker import framework
from agentenv_tinker.bundle import Playable, by_reason, listed
from agentenv_tinker.config import RunConfig
from agentenv_tinker.demonstrations import FILE_NAME, parse_demonstrations
from agentenv_tinker.errors import AgentEnvTinkerError, BundleError, ConfigError
from agentenv_tinker.preparation import check_host, dataset_of, eval_split, train_split
from agentenv_tinker.progress import quiet_console
from agentenv_tinker.recipe import configured, read_recipe, recipes
from agentenv_tinker.warm_start import demonstrations_file


@dataclass(frozen=True)
class Checked:
    """What a bundle has to train on, and what keeps it from being trained on."""

    splits: Mapping[str, int]
    """How many tasks of each split can be played; empty where the bundle can't be prepared."""
    left_out: Mapping[str, str]
    """Why each task that can't be played can't, by its name."""
    unscored: Mapping[str, str]
    """Why each task that makes no reward makes none, by its name."""
    recipes: tuple[str, ...]
    demonstrations: int
    """How many of them can be read."""
    problems: tuple[str, ...]
    """One a line, each naming its file or task; none where the bundle can be trained on."""

    def lines(self) -> Iterator[str]:
        """The report for a person, its problems left out."""
        if self.splits:
            yield f"tasks:          {', '.join(f'{name} {count}' for name, count in self.splits.items())}"
        yield f"recipes:        {', '.join(self.recipes) or 'none'}"
        yield f"demonstrations: {self.demonstrations or 'none'}"
        for title, reasons in (("left out", self.left_out), ("no reward", self.unscored)):
            for why, names in by_reason(reasons).items():
                yield f"{title + ':':<15} {listed(names)}: {why}"


def check(bundle: str) -> Checked:
    """Check a bundle, by its folder or name, with each of its recipes. Blocks: env images are built.

    Raises BundleError where there is no such bundle.
    """
    try:
        root = framework.bundle_folder(bundle)
    except framework.FrameworkBundleError as error:
        raise BundleError("\n".join(f"bundle {bundle!r}: {problem}" for problem in error.problems)) from error
    files = recipes(root)
    problems: list[str] = []
    configs = list(_configs(bundle, files, problems))
    with tempfile.TemporaryDirectory() as folder, quiet_console(Path(folder) / "console.log"), framework.routing():
        prepared = [one for config in configs if (one := _prepared(config, problems)) is not None]
    count = _check_demonstrations(root, configs, prepared, problems)
    return Checked(
        splits={name: len(tasks) for one in prepared[:1] for name, tasks in one.splits.items()},
        left_out={name: why for one in prepared[:1] for name, why in one.left_out.items()},
        unscored={name: why for one in prepared for name, why in _unscored(one)},
        recipes=tuple(path.stem for path in files),
        demonstrations=count,
        problems=tuple(dict.fromkeys(problems)),
    )


def _configs(bundle: str, files: Iterable[Path], problems: list[str]) -> Iterator[RunConfig]:
    """A run's settings by each recipe that can be read, and by none where there is none."""
    found = False
    for path in files:
        try:
            read_recipe(path)
        except ConfigError as error:
            problems += str(error).splitlines()
            continue
        try:
            yield configured(RunConfig, path, {"bundle": bundle})
            found = True
        except ConfigError as error:
            problems.append(f"recipe {str(path)!r}: {error}")
    if not found:
        yield RunConfig(bundle=bundle)


def _prepared(config: RunConfig, problems: list[str]) -> Playable | None:
    """The bundle as a run by `config` would play it, or None where it can't be prepared."""
    try:
        check_host(config)
        bundle = dataset_of(config).playable()
    except AgentEnvTinkerError as error:
        problems += str(error).splitlines()
        return None
    problems += _split_problems(config, bundle)
    return bundle


def _split_problems(config: RunConfig, bundle: Playable) -> Iterator[str]:
    evaluated = functools.partial(eval_split, config, bundle, option="eval_split")
    for chosen in (functools.partial(train_split, config, bundle), evaluated):
        try:
            bundle.split(chosen())
        except BundleError as error:
            yield str(error).splitlines()[0]  # what follows is why tasks are left out, which is told anyway


def _unscored(bundle: Playable) -> Iterator[tuple[str, str]]:
    for tasks in bundle.splits.values():
        yield from ((task.name, task.reward_problem) for task in tasks if task.reward_problem is not None)


def _check_demonstrations(
    root: Path, configs: Iterable[RunConfig], prepared: Iterable[Playable], problems: list[str]
) -> int:
    """How many demonstrations can be read, of the bundle's own file and those that its recipes name or need."""
    needed = {demonstrations_file(config) for config in configs if config.demonstrations or config.warm_start_steps}
    if (own := root / FILE_NAME).is_file():
        needed.add(own)
    known = {task.name for one in prepared for task in one.splits["all"]}
    known |= {name for one in prepared for name in one.left_out}
    read = 0
    for path in sorted(needed):
        try:
            demonstrations, bad = parse_demonstrations(path)
        except BundleError as error:
            problems.append(str(error))
            continue
        problems += bad
        read += len(demonstrations)
        unknown = sorted({one.task for one in demonstrations} - known) if known else []
        if unknown:
            problems.append(f"{path}: the bundle has no {listed(unknown)}")
    return read
