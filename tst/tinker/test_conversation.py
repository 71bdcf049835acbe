"""The episode as a conversation: what the model reads, in which order, and what its messages do."""

import pytest
from stand_in.bundles import task, write_bundle
from stand_in.model import Script, call
from stand_in.play import play

from agentenv_tinker.errors import EpisodeFailedError

OTHER_TOOLS = {
    "id": "hide",
    "type": "modify_env_tool_access",
    "env_id": "desk",
    "action": "disable",
    "role": "default",
    "tools": ["long"],
}

TASKS = {
    "one-turn": task("Write a note."),
    "no-system-prompt": task("Write a note.", system_prompt=None),
    "three-turns": task("First.", {"prompt": "Second.", "system_prompt": "Be brief."}, "Third."),
    "other-tools": task("First.", "Second.", between={1: [OTHER_TOOLS]}),
    "two-envs": task("Fetch.", envs=("desk", "shelf")),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return write_bundle(
        tmp_path_factory.mktemp("bundle") / "b", TASKS, evals={f"only-{name}": [name] for name in TASKS}
    )


async def test_the_first_prompt_follows_the_system_prompt_and_the_tools_in_the_renderers_own_prefix(bundle):
    """The tools are written once, by the renderer, with the system prompt, and the prompt comes next."""
    played = await play(bundle, Script(call("note", text="a"), "done"), train_split="only-one-turn")
    prefix, *_ = played.messages
    assert prefix["role"] == "system"
    assert prefix["content"].startswith("You keep a desk.\ntools:\n")
    assert "\nnote: Write a note. {" in prefix["content"]
    assert [message["role"] for message in played.messages].count("system") == 1
    assert played.conversation[0] == ("user", "Write a note.")


async def test_a_prefix_without_a_system_prompt_has_the_tools_alone(bundle):
    """A task need not have a system prompt."""
    played = await play(bundle, Script("done"), train_split="only-no-system-prompt")
    assert played.messages[0]["content"].startswith("\ntools:\n")


async def test_several_envs_offer_all_their_tools(bundle):
    """A turn's tools are those of every env that its agent acts in."""
    played = await play(
        bundle, Script(call("fetch", title="x") + call("note", text="y"), "done"), train_split="only-two-envs"
    )
    assert [content for role, content in played.conversation if role == "tool"] == ["fetched x", "noted 'y'"]


async def test_a_later_turn_is_the_next_user_message_of_the_same_conversation(bundle):
    """A changed system prompt is written before the prompt that brings it, once, and stays in effect."""
    played = await play(bundle, Script("one", "two", "three"), train_split="only-three-turns")
    assert played.conversation == [
        ("user", "First."),
        ("assistant", "one"),
        ("user", "Be brief.\n\nSecond."),
        ("assistant", "two"),
        ("user", "Third."),
        ("assistant", "three"),
    ]


async def test_a_later_turn_with_other_tools_fails_its_rollout_naming_them(bundle, sandboxes):
    """The prefix names the tools once, so they can't change."""
    with pytest.raises(EpisodeFailedError, match="a later turn offers other tools than the first: long"):
        await play(bundle, Script("one", "two"), train_split="only-other-tools")
    assert sandboxes == {}
