"""The file of demonstrations: what it may say, and what is told of one that can't be."""

from pathlib import Path

import pytest

from agentenv_tinker.demonstrations import DemonstratedCall, DemonstratedTurn, Demonstration, read_demonstrations
from agentenv_tinker.errors import BundleError


def read(tmp_path: Path, text: str) -> list[Demonstration]:
    path = tmp_path / "demonstrations.jsonl"
    path.write_text(text)
    return read_demonstrations(path)


def test_a_line_is_a_task_and_the_calls_that_play_it(tmp_path: Path) -> None:
    """The calls come in order, in a single turn that ends with the reply; arguments and reply can be left out."""
    assert read(
        tmp_path,
        '{"task": "a", "calls": [{"name": "read", "arguments": {"n": 1}}, {"name": "go"}], "reply": "There."}\n\n'
        '{"task": "b", "calls": []}\n',
    ) == [
        Demonstration(
            "a", (DemonstratedTurn((DemonstratedCall("read", {"n": 1}), DemonstratedCall("go", {})), "There."),)
        ),
        Demonstration("b", (DemonstratedTurn((), "Done."),)),
    ]


def test_a_task_of_several_turns_has_them_in_order(tmp_path: Path) -> None:
    """Each turn has calls and a reply of its own."""
    assert read(tmp_path, '{"task": "a", "turns": [{"calls": [], "reply": "1"}, {"calls": [{"name": "go"}]}]}') == [
        Demonstration("a", (DemonstratedTurn((), "1"), DemonstratedTurn((DemonstratedCall("go", {}),))))
    ]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[]", "a demonstration must be an object, not []"),
        ('{"calls": []}', "task must be a text, not null"),
        ('{"task": "a"}', "calls must be a list, not null"),
        ('{"task": "a", "calls": [{"arguments": {}}]}', "name must be a text, not null"),
        ('{"task": "a", "calls": [{"name": "go", "arguments": [1]}]}', "arguments must be an object, not [1]"),
        ('{"task": "a", "calls": [], "replies": ""}', "a demonstration has no field 'replies'"),
        ('{"task": "a", "calls": [], "turns": []}', "give either turns, or the calls and reply of its only turn"),
        ("{", "Expecting property name"),
    ],
)
def test_every_bad_line_is_told_with_its_number(tmp_path: Path, line: str, told: str) -> None:
    """What is wrong names the file and the line; the good lines beside it are not to blame."""
    with pytest.raises(BundleError) as refused:
        read(tmp_path, f'{{"task": "good", "calls": []}}\n{line}\n{line}\n')

    said = str(refused.value).splitlines()
    assert [each.partition(": ")[0] for each in said] == [f"{tmp_path}/demonstrations.jsonl, line {n}" for n in (2, 3)]
    assert all(told in each for each in said)


def test_a_file_with_nothing_in_it_or_none_at_all_is_told(tmp_path: Path) -> None:
    """Both are named."""
    with pytest.raises(BundleError, match="there is no demonstration in"):
        read(tmp_path, "\n")
    with pytest.raises(BundleError, match=r"can't be read: .*No such file"):
        read_demonstrations(tmp_path / "none.jsonl")
