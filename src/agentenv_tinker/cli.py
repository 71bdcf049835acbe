"""The command line: options in, one call of the library, exit code out.

Exit codes: 0 done; 1 a run that had started failed; 2 bad input, with nothing started or left behind; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import click

from agentenv_tinker.comparison import compare as compared
from agentenv_tinker.config import EvalConfig, PlayConfig, RunConfig, WarmStartConfig
from agentenv_tinker.errors import AgentEnvTinkerError, BundleError, ConfigError, EpisodeFailedError, TrainingError
from agentenv_tinker.evaluation import Evaluation
from agentenv_tinker.recipe import configured, find_recipe
from agentenv_tinker.tables import comparison_table, evaluation_table

if TYPE_CHECKING:
    from agentenv_tinker.progress import Say
    from agentenv_tinker.training import Trained

_Config = TypeVar("_Config", bound=PlayConfig)
_Result = TypeVar("_Result")
_NAMES = {"checkpoint": "from"}  # options that are not called as their setting is
_EVAL_NAMES = {**_NAMES, "eval_split": "split", "eval_tasks": "tasks", "eval_temperature": "temperature"}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="agentenv-tinker")
def cli() -> None:
    """Train a language model with Tinker on the tasks of an AgentEnv bundle."""


def _options(
    config: type[PlayConfig], names: Mapping[str, str] = _NAMES
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An option for each setting of `config` but its bundle, an argument."""
    defaults = {setting.name: setting.default for setting in dataclasses.fields(config)}

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        for name, hint in reversed(get_type_hints(config, include_extras=True).items()):
            kind, meaning = get_args(hint)
            if name != "bundle":
                shown = meaning if defaults[name] in ("", ()) else f"{meaning}  [{defaults[name]}]"
                several = get_origin(kind) is tuple
                option = click.option(
                    f"--{names.get(name, name).replace('_', '-')}",
                    name,
                    type=get_args(kind)[0] if several else kind,
                    multiple=several,
                    help=shown,
                )
                command = option(command)
        return command

    return with_options


_recipe_option = click.option(
    "--recipe", default="", help="A recipe: a TOML file, or the name of one of the bundle's; else its `recipe.toml`."
)


def _config(kind: type[_Config], bundle: str, recipe: str, options: dict[str, Any]) -> _Config:
    """The settings of a command: the options that were given, the recipe's, and the defaults."""
    from agentenv_tinker.framework import FrameworkBundleError, bundle_folder

    try:
        path = find_recipe(bundle_folder(bundle), recipe)
    except FrameworkBundleError as error:
        raise BundleError("\n".join(f"bundle {bundle!r}: {problem}" for problem in error.problems)) from error
    given = {name: value for name, value in options.items() if value not in (None, ())}
    return configured(kind, path, {**given, "bundle": bundle})


@cli.command()
@click.argument("bundle")
@_recipe_option
@_options(RunConfig)
def train(bundle: str, recipe: str, **options: Any) -> None:
    """Train on BUNDLE, a folder or an installed bundle's name, and evaluate before and after."""
    from agentenv_tinker.training import train as run

    config = _config(RunConfig, bundle, recipe, options)
    _tell(_run(config.folder, lambda say: run(config, say=say)))


@cli.command()
@click.argument("folder", type=Path)
def resume(folder: Path) -> None:
    """Go on with the interrupted training run in FOLDER, with its own settings, from the last state that it saved."""
    from agentenv_tinker.training import resume as run

    _tell(_run(folder, lambda say: run(folder, say=say)))


def _tell(trained: Trained) -> None:
    if trained.base is not None:
        click.echo(f"held-out reward of the base model: {trained.base.line}")
    click.echo(f"held-out reward before: {trained.before.line}")
    click.echo(f"held-out reward after:  {trained.after.line}")
    click.echo(f"report:     {trained.folder / 'report.html'}")
    click.echo(f"run:        {trained.folder}  (metrics.jsonl, iteration_*/*.html, records/)")
    click.echo(f"checkpoint: {trained.checkpoint}")
    if trained.adapter is not None:
        click.echo(f"adapter:    {trained.adapter}")


@cli.command("warm-start")
@click.argument("bundle")
@_recipe_option
@_options(WarmStartConfig)
def warm_start(bundle: str, recipe: str, **options: Any) -> None:
    """Teach the model the demonstrations of BUNDLE that score well, for `train` to go on from."""
    from agentenv_tinker.training import warm_started

    config = _config(WarmStartConfig, bundle, recipe, options)
    started = _run(config.folder, lambda say: warm_started(config, say=say))
    click.echo(f"warm start: {started.folder}")
    click.echo(f"to train:   agentenv-tinker train {bundle} --from {started.state_path}")
    click.echo(f"to play:    agentenv-tinker eval {bundle} --from {started.sampler_path}")


@cli.command()
@click.argument("bundle")
@click.option(
    "--records",
    type=click.Path(exists=True, file_okay=False),
    help="A run's folder `records`; else the framework's own.",
)
def demonstrations(bundle: str, records: str | None) -> None:
    """Write the recorded runs of BUNDLE's tasks, by whichever agent, as demonstrations to learn from."""
    if records is not None:
        os.environ["XDG_STATE_HOME"] = str(Path(records).resolve())
    from agentenv_tinker.demonstrations import demonstration_line
    from agentenv_tinker.replay import recorded_demonstrations

    for demonstration in recorded_demonstrations(bundle):
        click.echo(demonstration_line(demonstration), nl=False)


@cli.command()
@click.argument("bundle")
def check(bundle: str) -> None:
    """Check BUNDLE and its recipes with no model: every problem that keeps it from being trained on."""
    from agentenv_tinker.checking import check as checked

    found = checked(bundle)
    for line in found.lines():
        click.echo(line)
    if found.problems:
        raise BundleError("\n".join([f"{bundle} can't be trained on:", *found.problems]))
    click.echo(f"{bundle} can be trained on")


@cli.command("eval")
@click.argument("bundle")
@_recipe_option
@_options(EvalConfig, _EVAL_NAMES)
def evaluate(bundle: str, recipe: str, **options: Any) -> None:
    """Play a split of BUNDLE with the base model or a checkpoint, and say what it earns."""
    from agentenv_tinker.playing import evaluated

    config = _config(EvalConfig, bundle, recipe, options)
    click.echo(evaluation_table(_run(config.folder, lambda say: evaluated(config, say=say))))
    click.echo(f"\nevaluation: {config.folder / 'evaluation.json'}")


@cli.command()
@click.argument("first", type=Path)
@click.argument("second", type=Path)
def compare(first: Path, second: Path) -> None:
    """Compare two evaluations of the same tasks: FIRST and SECOND are evaluations' files or `eval` runs' folders."""
    before, after = Evaluation.read(_evaluation(first)), Evaluation.read(_evaluation(second))
    click.echo(comparison_table(before, after, compared(before, after)))


def _evaluation(given: Path) -> Path:
    """The evaluation's file that is meant by its own path or by its run's."""
    if not given.is_dir():
        return given
    if not (given / "evaluation.json").exists() and (others := sorted(given.glob("evaluations/*.json"))):
        raise ConfigError(f"{str(given)!r} holds several evaluations; name one: {', '.join(map(str, others))}")
    return given / "evaluation.json"


@cli.command()
@click.argument("folder", type=Path)
def report(folder: Path) -> None:
    """Write the page of the training run in FOLDER anew, from what the run left there so far: report.html."""
    from agentenv_tinker.report import write_report

    click.echo(write_report(folder))


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def serve(options: tuple[str, ...]) -> None:
    """Serve tinker_local, a Tinker-compatible service on this machine; see serve --help."""
    from tinker_local.__main__ import main as serve_local

    sys.exit(serve_local(list(options)))


def _run(folder: Path, command: Callable[[Say], Coroutine[Any, Any, _Result]]) -> _Result:
    """Run a command that works in `folder`, and tells of it as it goes."""
    from agentenv_tinker.live import watched
    from agentenv_tinker.stopping import sigint_restored, stoppable

    with watched(folder, sys.stderr) as say, sigint_restored(), asyncio.Runner() as runner:
        runner.get_loop().set_exception_handler(_unheard)
        return runner.run(stoppable(command(say), say))


def _unheard(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say nothing of an episode that failed where nobody waits for it any more, as after a Ctrl-C."""
    if not isinstance(context.get("exception"), EpisodeFailedError):
        loop.default_exception_handler(context)


def main() -> None:
    """Run the command line, and exit with its code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts with `&` ignore it
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt, asyncio.CancelledError):
        click.echo("agentenv-tinker: interrupted", err=True)
        sys.exit(130)
    except AgentEnvTinkerError as error:
        click.echo(f"agentenv-tinker: {error}", err=True)
        sys.exit(1 if isinstance(error, TrainingError | EpisodeFailedError) else 2)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """A SIGTERM, as `docker stop` sends it, stops as a Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)
