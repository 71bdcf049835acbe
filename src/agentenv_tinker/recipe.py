"""Reads recipes: TOML files of settings by name, beside a bundle's tasks, and writes a run's own.

Of a setting, an option comes before the recipe, and the recipe before the default. A recipe serves every command: each
takes the settings that it has.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from agentenv_tinker.config import EvalConfig, PlayConfig, RunConfig
from agentenv_tinker.errors import ConfigError

FILE_NAME = "recipe.toml"
_NOT_IN_RECIPES = ("runs", "run")
_Config = TypeVar("_Config", bound=PlayConfig)


def find_recipe(bundle: Path, named: str) -> Path | None:
    """The recipe file that `named` means for the bundle in the folder `bundle`, or None where there is none.

    A path is that file; a plain name, such as `quick`, the bundle's file `quick.toml`; nothing, its `recipe.toml`, if
    it has one. Raises ConfigError for a file that isn't there.
    """
    if not named:
        return bundle / FILE_NAME if (bundle / FILE_NAME).is_file() else None
    path = Path(named) if named.endswith(".toml") else bundle / f"{named}.toml"
    if not path.is_file():
        here = ", ".join(file.stem for file in recipes(bundle)) or "none"
        raise ConfigError(f"there is no recipe {str(path)!r}; the bundle's are: {here}")
    return path


def recipes(bundle: Path) -> list[Path]:
    """The recipe files of the bundle in the folder `bundle`: its TOML files but the framework's own."""
    return sorted(path for path in bundle.glob("*.toml") if path.name != "aliases.toml")


def configured(kind: type[_Config], recipe: Path | None, options: Mapping[str, Any]) -> _Config:
    """A command's settings: `options`, then the recipe's, then the defaults.

    Raises ConfigError for a recipe that can't be read, a setting that no command has, and a value that can't be.
    """
    settings = read_recipe(recipe) if recipe is not None else {}
    known = _kinds(kind)
    return kind(**{name: value for name, value in {**settings, **options}.items() if name in known})


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings in the file at `path`, by name. Raises ConfigError with every problem, naming file and setting."""
    try:
        written = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"recipe {str(path)!r} can't be read: {error}") from error
    kinds = {**_kinds(EvalConfig), **_kinds(RunConfig)}
    settings: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in written.items():
        try:
            settings[name] = _value(path, name, value, kinds)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return settings


def _kinds(config: type[PlayConfig]) -> dict[str, Any]:
    """The type of each setting."""
    return {name: get_args(hint)[0] for name, hint in get_type_hints(config, include_extras=True).items()}


def _value(path: Path, name: str, value: Any, kinds: Mapping[str, Any]) -> Any:
    where = f"recipe {str(path)!r}"
    if name not in kinds or name in _NOT_IN_RECIPES:
        close = difflib.get_close_matches(name, kinds, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "; a recipe holds settings by name, and no tables"
        raise ConfigError(f"{where}: there is no setting {name!r}{hint}")
    kind = kinds[name]
    if get_origin(kind) is tuple:
        if isinstance(value, list) and all(_is(each, get_args(kind)[0]) for each in value):
            return tuple(value)
        said = {float: "numbers", str: "texts"}[get_args(kind)[0]]
        raise ConfigError(f"{where}: {name} must be a list of {said}, not {json.dumps(value, default=str)}")
    if not _is(value, kind):
        said = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}[kind]
        raise ConfigError(f"{where}: {name} must be {said}, not {json.dumps(value, default=str)}")
    return kind(value)


def _is(value: Any, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def write_recipe(config: PlayConfig, path: Path) -> None:
    """Write every setting of `config` that a recipe can hold, so that a run can be made again from the file."""
    settings = {name: value for name, value in config.to_dict().items() if name not in _NOT_IN_RECIPES}
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
