"""The command line: options in, one call of the library, exit code out.

Exit codes: 0 done; 1 a run that had started failed; 2 bad input, with nothing started or left behind; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, get_args, get_type_hints

import click

from agentenv_tinker.config import RunConfig
from agentenv_tinker.errors import AgentEnvTinkerError, EpisodeFailedError, TrainingError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="agentenv-tinker")
def cli() -> None:
    """Train a language model with Tinker on the tasks of an AgentEnv bundle."""


def _run_options(command: Callable[..., None]) -> Callable[..., None]:
    """An option for each setting of a run but its bundle, an argument."""
    defaults = {setting.name: setting.default for setting in dataclasses.fields(RunConfig)}
    for name, hint in reversed(get_type_hints(RunConfig, include_extras=True).items()):
        kind, meaning = get_args(hint)
        if name != "bundle":
            shown = meaning if defaults[name] == "" else f"{meaning}  [{defaults[name]}]"
            command = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=shown)(command)
    return command


@cli.command()
@click.argument("bundle")
@_run_options
def train(**options: Any) -> None:
    """Train on BUNDLE, a folder or an installed bundle's name, and evaluate before and after."""
    from agentenv_tinker.training import train as run

    config = RunConfig(**{name: value for name, value in options.items() if value is not None})
    trained = asyncio.run(run(config, say=_progress()))
    click.echo(f"held-out reward before: {trained.before.line}")
    click.echo(f"held-out reward after:  {trained.after.line}")
    click.echo(f"run:        {trained.folder}  (metrics.jsonl, iteration_*/*.html, records/)")
    click.echo(f"checkpoint: {trained.checkpoint}")
    if trained.adapter is not None:
        click.echo(f"adapter:    {trained.adapter}")


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def serve(options: tuple[str, ...]) -> None:
    """Serve tinker_local, a Tinker-compatible service on this machine; see serve --help."""
    from tinker_local.__main__ import main as serve_local

    sys.exit(serve_local(list(options)))


def _progress() -> Callable[[str], None]:
    began, stderr = time.monotonic(), sys.stderr

    def say(line: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - began), 60)
        click.echo(f"[{minutes:02d}:{seconds:02d}] {line}", file=stderr)

    return say


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
