"""The env's server: its card, its tools and its data operations, in process."""

import httpx
import pytest
from mcp.shared.memory import create_connected_server_and_client_session

DAY = {"prices": [2, 8, 3], "capacity": 1, "power": 1, "loss": 25}
EMPTY = {"schedule": None, "profit": None, "best_profit": 400}


@pytest.fixture
def app(server):
    return server.GridSim().create_app()


@pytest.fixture
async def client(app):
    """The env's HTTP side, as the framework reaches it."""
    transport = httpx.ASGITransport(app=app.streamable_http_app())
    async with httpx.AsyncClient(transport=transport, base_url="http://gridsim") as client:
        yield client


async def set_day(client, **changes):
    return await client.post("/agentenv/ext/set_day", json={**DAY, **changes})


async def rpc(client, method):
    return (await client.post("/agentenv", json={"jsonrpc": "2.0", "id": 1, "method": method})).json()


async def outcome(client):
    return (await rpc(client, "data/get"))["result"]["parts"][0]["data"]


async def call(app, name, **arguments):
    """A tool's answer over MCP, as an agent gets it: its text, marked when it is an error."""
    async with create_connected_server_and_client_session(app) as session:
        result = await session.call_tool(name, arguments)
    text = "".join(part.text for part in result.content)
    return f"error: {text}" if result.isError else text


async def test_card_declares_what_the_env_does(client):
    """The card names the env, its day extension, its tools and the data operations it has."""
    card = (await client.get("/.well-known/agent-env.json")).json()
    capabilities = card["capabilities"]
    assert {
        "name": card["name"],
        "extensions": [extension["uri"] for extension in capabilities["extensions"]],
        "tools": [tool["name"] for tool in capabilities["tools"]],
        "operations": capabilities["operations"],
    } == {
        "name": "gridsim",
        "extensions": ["urn:gridsim:day/v1"],
        "tools": ["read_day", "submit_schedule"],
        "operations": ["data/reset", "data/get"],
    }


async def test_a_day_is_read(app, client):
    """The agent reads the price of each block, and the battery."""
    await set_day(client)
    assert await call(app, "read_day") == "prices: 2 8 3; battery: holds 1, moves 1, loses 25%"


async def test_a_schedule_is_taken_once(app, client):
    """The first schedule counts; a second one is refused and changes nothing."""
    await set_day(client)
    assert [
        await call(app, "submit_schedule", schedule="buy sell hold"),
        await call(app, "submit_schedule", schedule="hold hold hold"),
    ] == ["submitted", "error: already_submitted: a schedule is in; only the first one counts"]
    assert await outcome(client) == {"schedule": "buy sell hold", "profit": 400, "best_profit": 400}


async def test_a_malformed_schedule_is_not_a_submission(app, client):
    """A malformed schedule gets an error, and a good one after it counts."""
    await set_day(client)
    refused = [await call(app, "submit_schedule", schedule=text) for text in ("buy sell", "buy sell rest")]
    assert refused == [
        "error: invalid_schedule: got 2 words; send one for each of 3 blocks",
        "error: invalid_schedule: 'rest' can't stand in block 3, whose price is 3; send buy, hold or sell",
    ]
    assert await outcome(client) == EMPTY
    assert await call(app, "submit_schedule", schedule="hold hold hold") == "submitted"
    assert await outcome(client) == {"schedule": "hold hold hold", "profit": 0, "best_profit": 400}


async def test_reset_forgets_the_day_and_its_schedule(app, client):
    """After data/reset there is no day to read, to plan or to score until one is set, and that one has no schedule."""
    await set_day(client)
    await call(app, "submit_schedule", schedule="hold hold hold")
    assert (await rpc(client, "data/reset"))["result"] == {}

    no_day = "no day is set; a task sets one by urn:gridsim:day/v1"
    assert await call(app, "read_day") == f"error: no_day: {no_day}"
    assert await call(app, "submit_schedule", schedule="hold hold hold") == f"error: no_day: {no_day}"
    assert (await rpc(client, "data/get"))["error"] == {
        "code": -32000,
        "message": no_day,
        "data": {"code": "get_failed"},
    }
    await set_day(client)
    assert await outcome(client) == EMPTY


async def test_a_new_day_starts_without_a_schedule(app, client):
    """Setting a day replaces the one before it, schedule and all."""
    await set_day(client)
    await call(app, "submit_schedule", schedule="hold hold hold")
    await set_day(client, loss=0)
    assert await outcome(client) == {"schedule": None, "profit": None, "best_profit": 600}


async def test_a_day_that_makes_no_sense_is_refused(client):
    """A bad day is answered with what is wrong with it, and the day before it stays."""
    await set_day(client)
    refusal = await set_day(client, prices=[1, -1])
    assert (refusal.status_code, refusal.json()["error"]["message"]) == (
        400,
        "prices: expected whole numbers from 0 to 1000, got -1",
    )
    assert await outcome(client) == EMPTY
