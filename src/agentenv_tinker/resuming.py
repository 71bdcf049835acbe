"""Reads an interrupted training run's folder: whether it can go on, from which step, and what is made anew.

A run goes on from the last training state that it saved. The steps after that are made again, so what the folder has of
them is dropped; the framework's records keep their episodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import tinker
from tinker_cookbook import checkpoint_utils

from agentenv_tinker import framework
from agentenv_tinker.config import RunConfig
from agentenv_tinker.errors import BundleError, ConfigError, boundary
from agentenv_tinker.history import SUMMARY_FILE
from agentenv_tinker.recipe import FILE_NAME, configured

_BUNDLE_FILE = "bundle.sha256"
_FREE = ("bundle", "runs", "run", "max_concurrent_episodes", "sandbox", "save_every")  # they may change meanwhile
_NOT_PLAYED = re.compile(r"[^/]*\.toml|[^/]*\.jsonl|[^/]*\.md|[^/]*\.py|(.*/)?__pycache__/.*")  # recipes and the like
_NAMED = 5


def record_bundle(config: RunConfig) -> None:
    """Keep in the run's folder which files of its bundle it plays, as `sha256sum` writes them. Blocks."""
    lines = (f"{digest}  {path}\n" for path, digest in _played_files(config.bundle).items())
    (config.folder / _BUNDLE_FILE).write_text("".join(lines))


def interrupted(folder: Path) -> RunConfig:
    """The settings of the training run in `folder`, which was interrupted. Blocks.

    Raises ConfigError for a folder that isn't one's, a run that is finished and settings that were changed since, and
    BundleError for a bundle that was.
    """
    folder = folder if folder.name else folder.resolve()
    started = _started_with(folder)
    if (folder / SUMMARY_FILE).exists():
        raise ConfigError(f"run {folder.name!r} is finished: {folder / SUMMARY_FILE} says what it came to")
    config = configured(RunConfig, folder / FILE_NAME, {"runs": folder.parent, "run": folder.name})
    now = json.loads(json.dumps(config.to_dict()))
    changed = [name for name in now if name not in _FREE and now[name] != started.get(name, now[name])]
    if changed:
        listed = ", ".join(f"{name} was {started[name]!r} and is {now[name]!r}" for name in changed)
        raise ConfigError(f"{folder / FILE_NAME} was changed since the run started: {listed}; put it back")
    _check_bundle(config)
    return config


def _started_with(folder: Path) -> dict[str, Any]:
    """The settings that the run in `folder` was started with."""
    with boundary(ConfigError, f"{str(folder)!r} is not the folder of a training run", OSError, ValueError):
        started = json.loads((folder / "run.json").read_text())
    if not isinstance(started, dict) or "steps" not in started:
        raise ConfigError(f"{str(folder)!r} is the folder of another command than train")
    return started


def _check_bundle(config: RunConfig) -> None:
    """Raises BundleError where a file that is played isn't what it was."""
    recorded = config.folder / _BUNDLE_FILE
    lines = recorded.read_text().splitlines() if recorded.exists() else []
    then = {path: digest for digest, _, path in (line.partition("  ") for line in lines)}
    now = _played_files(config.bundle)
    changed = sorted(path for path in then.keys() | now.keys() if then.get(path) != now.get(path))
    if then and changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise BundleError(
            f"bundle {config.bundle!r} was changed since the run started: {', '.join(changed[:_NAMED])}{more}; "
            "put it back, or start another run from this one's weights with --from"
        )


def _played_files(bundle: str) -> dict[str, str]:
    """The digest of each file of the bundle that an episode may depend on, by its path in the bundle."""
    try:
        root = framework.bundle_folder(bundle)
    except framework.FrameworkBundleError as error:
        raise BundleError("\n".join(f"bundle {bundle!r}: {problem}" for problem in error.problems)) from error
    if not root.is_dir():
        raise BundleError(f"bundle {bundle!r}: there is no such folder")
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    names = ((path.relative_to(root).as_posix(), path) for path in paths)
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in names if not _NOT_PLAYED.fullmatch(name)
    }


def next_step(folder: Path) -> int:
    """The step that the run in `folder` makes next: its last training state's, or 0 where none was saved yet."""
    last = checkpoint_utils.get_last_checkpoint(str(folder))
    return last.batch or 0 if last is not None else 0


async def check_kept(folder: Path) -> None:
    """Raises ConfigError where the Tinker service has lost the training state that the run in `folder` goes on from."""
    last = checkpoint_utils.get_last_checkpoint(str(folder))
    if last is None or last.state_path is None:
        return
    gone = (tinker.NotFoundError, tinker.BadRequestError, tinker.PermissionDeniedError)
    with boundary(ConfigError, f"the Tinker service doesn't have {last.state_path!r}, to go on from", *gone):
        await tinker.ServiceClient().create_rest_client().get_weights_info_by_tinker_path(last.state_path)


def rewind(folder: Path, step: int) -> None:
    """Drop what the run in `folder` left of `step` and later ones, but for a whole evaluation before `step`. Blocks."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        lines = metrics.read_text().splitlines()
        metrics.write_text("".join(f"{line}\n" for line in lines if _step_of(line) < step))
    for made in folder.glob("iteration_*"):
        number = int(made.name.removeprefix("iteration_"))
        if number > step or (number == step and not evaluated(folder, step)):
            shutil.rmtree(made)
        elif number == step:
            for path in made.iterdir():
                if not path.name.startswith("eval_"):
                    path.unlink()


def _step_of(line: str) -> float:
    """The step of a line of metrics; past every step, for one that a kill cut short."""
    with contextlib.suppress(ValueError, KeyError):
        return int(json.loads(line)["step"])
    return math.inf


def evaluated(folder: Path, step: int) -> bool:
    """Whether the run in `folder` has the whole evaluation that the cookbook makes before `step`."""
    records = folder / f"iteration_{step:06d}" / "eval_test_rollout_summaries.jsonl"
    return records.exists() and records.read_bytes()[-1:] == b"\n"
