"""Arguments mean what their tool's schema says, however a renderer wrote and read them."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv_tinker.arguments import typed_arguments

TREE = {
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            },
        }
    },
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}},
}


def typed(value, schema, root=None):
    """One argument typed by its schema."""
    whole = {**(root or {}), "type": "object", "properties": {"it": schema}}
    return typed_arguments({"it": value}, whole)["it"]


@pytest.mark.parametrize(
    ("value", "schema", "meant"),
    [
        (19122, {"type": "string"}, "19122"),
        (20, {"type": "string"}, "20"),
        (True, {"type": "string"}, "true"),
        (None, {"type": "string"}, "null"),
        ({"a": [1]}, {"type": "string"}, '{"a": [1]}'),
        ("é", {"type": "string"}, "é"),
        (5, {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        (None, {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        (5, {"type": ["string", "null"]}, "5"),
        (5, {"oneOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5"),
        (5, {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, 5),
        ("5", {"type": "integer"}, 5),
        ("020", {"type": "integer"}, 20),
        (5.0, {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, 5.5),
        ("five", {"type": "integer"}, "five"),
        ("0.5", {"type": "number"}, 0.5),
        ("half", {"type": "number"}, "half"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        (1, {"type": "boolean"}, 1),
        (20, {"enum": ["010", "020"]}, "020"),
        (20, {"enum": ["20", "020"]}, "20"),
        (True, {"enum": ["true", "false"]}, "true"),
        ("2", {"enum": [1, 2]}, 2),
        ("3", {"enum": [1, 2]}, "3"),
        (True, {"enum": [1, 2]}, True),
        (7, {"const": "7"}, "7"),
        ('["a", 1]', {"type": "array", "items": {"type": "string"}}, ["a", "1"]),
        ([1, "2"], {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, ["1", 2]),
        ("a, b", {"type": "array"}, "a, b"),
        ('{"x": "4"}', {"type": "object", "properties": {"x": {"type": "integer"}}}, {"x": 4}),
        ({"x": "4", "y": "4"}, {"type": "object", "additionalProperties": {"type": "integer"}}, {"x": 4, "y": 4}),
        ({"x": "4"}, {"properties": {"x": {"type": "integer"}}}, {"x": 4}),
        ({"x": "4"}, {"allOf": [{"properties": {"x": {"type": "integer"}}}]}, {"x": 4}),
        ("4", {}, "4"),
        ("4", True, "4"),
        ("4", {"$ref": "#/$defs/nowhere"}, "4"),
        ("4", {"$ref": "#"}, "4"),
        ("4", {"$ref": "#/properties/it"}, "4"),
        ("4", {"allOf": [{"$ref": "#/properties/it"}]}, "4"),
    ],
)
def test_a_value_becomes_what_its_schema_settles_and_is_left_alone_where_it_settles_nothing(value, schema, meant):
    """A bool isn't an int, nor an int a bool."""
    result = typed(value, schema)
    assert result == meant
    assert type(result) is type(meant)


def test_references_are_followed_to_any_depth():
    """A tree of nodes is typed at each of its levels, by the one definition."""
    given_tree = {"name": 1, "size": "3", "children": [{"name": 2, "size": None, "children": [{"name": True}]}]}
    assert typed_arguments({"root": given_tree}, TREE) == {
        "root": {"name": "1", "size": 3, "children": [{"name": "2", "size": None, "children": [{"name": "true"}]}]}
    }


def test_what_is_given_is_not_changed():
    """Neither the arguments nor the schema."""
    arguments, schema = {"root": {"name": 1}}, json.loads(json.dumps(TREE))
    typed_arguments(arguments, schema)
    assert (arguments, schema) == ({"root": {"name": 1}}, TREE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.text(max_size=8) | st.from_regex(r"[0-9]{1,6}|true|false|-?[0-9]\.[0-9]", fullmatch=True)


@st.composite
def strings(draw):
    """A string that a reader who guesses gives back as something that is written the same."""
    text = draw(WORDS)
    read = guessed(text)
    return text if isinstance(read, str) or json.dumps(read, ensure_ascii=False) == text else f"a{text}"


def guessed(text):
    """What a renderer reads an untyped parameter as."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def untyped(value):
    """A parameter written as text, and read back by guess."""
    return guessed(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def leaf(kind, values):
    return values.map(lambda value: ({"type": kind}, value))


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
LEAVES = st.one_of(
    leaf("string", strings()),
    leaf("integer", st.integers(-(10**9), 10**9)),
    leaf("number", NUMBERS),
    leaf("boolean", st.booleans()),
    (strings().filter(lambda text: text != "null") | st.none()).map(lambda value: (NULLABLE, value)),
    st.sampled_from(["fast", "020", "7", "true"]).map(lambda value: ({"enum": ["fast", "020", "7", "true"]}, value)),
)


def within(inner):
    """An object or an array of what `inner` makes, with its schema."""
    objects = st.dictionaries(st.text(max_size=4), inner, max_size=3).map(
        lambda members: (
            {"type": "object", "properties": {name: schema for name, (schema, _) in members.items()}},
            {name: value for name, (_, value) in members.items()},
        )
    )
    arrays = inner.flatmap(lambda one: st.lists(st.just(one), max_size=3)).map(
        lambda items: (
            {"type": "array", "items": items[0][0] if items else {}},
            [value for _, value in items],
        )
    )
    return objects | arrays


TYPED = st.recursive(LEAVES, within, max_leaves=8)


@given(TYPED)
def test_a_parameter_written_as_text_and_read_by_guess_comes_back_as_it_was(pair):
    """Whatever its schema, for all that a guess leaves recognizable."""
    schema, value = pair
    result = typed(untyped(value), schema)
    assert result == value
    assert type(result) is type(value) or math.isclose(result, value)


@given(TYPED)
def test_arguments_of_the_right_types_stay_as_they_are(pair):
    """Typing does no harm where none is needed."""
    schema, value = pair
    assert typed(value, schema) == value


@given(JSON, TYPED.map(lambda pair: pair[0]))
def test_typing_is_done_once(value, schema):
    """What it gives, it gives again."""
    once = typed(value, schema)
    assert typed(once, schema) == once


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=3), JSON)
def test_a_schema_that_is_none_settles_nothing_and_breaks_nothing(arguments, nonsense):
    """An env can send anything for one."""
    assert typed_arguments(arguments, {"properties": nonsense}).keys() == arguments.keys()
    assert typed_arguments(arguments, {"type": "object", "anyOf": nonsense}).keys() == arguments.keys()
