"""Types a tool call's arguments by the tool's JSON schema.

Some renderers write parameters as untyped text and read them back by guess: the string "19122" returns as a number,
"true" as a boolean. Where the schema settles what was meant, the value becomes that; everything else is left alone, so
that the tool's own validation has the last word.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]

_MAX_REFERENCES = 32  # a `$ref` that only leads to itself ends here


def typed_arguments(arguments: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """`arguments` as `schema`, a tool's input schema, means them. Neither is changed."""
    try:
        typed = _typed(dict(arguments), schema, schema)
    except RecursionError:  # a schema that goes in circles settles nothing
        return dict(arguments)
    return typed if isinstance(typed, dict) else dict(arguments)


def _typed(value: Any, schema: Any, root: Schema) -> Any:
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping):
        return value
    for part in _list(schema.get("allOf")):
        value = _typed(value, part, root)
    if options := _options(schema):
        value = _typed_as_one_of(value, [_resolved(option, root) for option in options], root)
    if (members := _members(schema)) is not None:
        return _typed_as_member(value, members)
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return _typed_as_one_of(value, [{**schema, "type": kind} for kind in kinds], root)
    if kinds is None and "properties" in schema:
        kinds = "object"
    convert = _CONVERSIONS.get(kinds) if isinstance(kinds, str) else None
    return _typed_within(convert(value) if convert else value, schema, root)


def _resolved(schema: Any, root: Schema) -> Any:
    """`schema` with its `$ref` followed within the document; one that leads nowhere settles nothing."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        target: Any = root
        for key in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, Mapping) and key else target
        schema = target
    return None


def _typed_within(value: Any, schema: Schema, root: Schema) -> Any:
    """The members of an object or array, typed by what the schema says of each."""
    if isinstance(value, dict):
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        rest = schema.get("additionalProperties")
        return {key: _typed(member, properties.get(key, rest), root) for key, member in value.items()}
    if isinstance(value, list):
        first = _list(schema.get("prefixItems"))
        rest = schema.get("items")
        return [_typed(member, first[i] if i < len(first) else rest, root) for i, member in enumerate(value)]
    return value


def _typed_as_one_of(value: Any, options: list[Any], root: Schema) -> Any:
    """`value` itself where an option takes it as it is, else as the first option that can take it."""
    taking = [option for option in options if _takes(value, option, root)]
    if taking:
        return _typed(value, taking[0], root) if isinstance(value, dict | list) else value
    for option in options:
        typed = _typed(value, option, root)
        if _takes(typed, option, root):
            return typed
    return value


def _typed_as_member(value: Any, members: list[Any]) -> Any:
    """The enum member that `value` is, or is written as, or that reads as `value`; only one may be."""
    if any(_same(value, member) for member in members):
        return value
    written = [member for member in members if _text(member) == _text(value)]
    if not written and _is_number(value):  # "020" was read as 20
        written = [member for member in members if isinstance(member, str) and _loosely(member) == value]
    return written[0] if len(written) == 1 else value


def _takes(value: Any, schema: Any, root: Schema) -> bool:
    """Whether `value` is already of the type that `schema` names, members and bounds aside."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping):
        return True
    if options := _options(schema):
        return any(_takes(value, option, root) for option in options)
    if (members := _members(schema)) is not None:
        return any(_same(value, member) for member in members)
    kinds = schema.get("type", "object" if "properties" in schema else None)
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return any(not isinstance(kind, str) or kind not in _TYPES or _TYPES[kind](value) for kind in kinds)


def _options(schema: Schema) -> list[Any]:
    return _list(schema.get("anyOf")) or _list(schema.get("oneOf"))


def _members(schema: Schema) -> list[Any] | None:
    """The values that `schema` lists, or None where it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return _list(schema["enum"]) if "enum" in schema else None


def _list(value: Any) -> list[Any]:
    """A list of a schema; an env can send anything in its place."""
    return value if isinstance(value, list) else []


def _same(value: Any, member: Any) -> bool:
    return bool(value == member and isinstance(value, bool) == isinstance(member, bool))


def _text(value: Any) -> str:
    """What a renderer writes for `value` where parameters are plain text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read(value: Any) -> Any:
    """The JSON value that a string spells, or the string."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _loosely(text: str) -> float | None:
    """The number that a string is read as by a reader that minds no leading zeros, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def _integer(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = _read(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _number(value: Any) -> Any:
    read = _read(value)
    return read if _is_number(read) else value


def _boolean(value: Any) -> Any:
    return {"true": True, "false": False}.get(value.strip().lower(), value) if isinstance(value, str) else value


def _read_as(kind: type) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        read = _read(value)
        return read if isinstance(read, kind) else value

    return convert


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return _is_number(value) and (isinstance(value, int) or value.is_integer())


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "string": _text,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": lambda value: None if value == "null" else value,
    "array": _read_as(list),
    "object": _read_as(dict),
}
_TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": _is_integer,
    "number": _is_number,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}
