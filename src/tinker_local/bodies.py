"""Request bodies, read up to a limit, and the answer that a future's ticket travels in."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tinker_local import wire
from tinker_local.errors import TooLargeError
from tinker_local.wire import Json

MAX_BODY_BYTES = 64 << 20


async def read(request: Request) -> bytes:
    """Return the request's body; raises TooLargeError once it is over the limit."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise TooLargeError(f"the body is over {MAX_BODY_BYTES >> 20} MB: send fewer data in one request")
        pieces.append(piece)
    return b"".join(pieces)


async def read_json(request: Request) -> Json:
    """Return the request's body as a JSON object; raises as `read` does, and InvalidRequestError if it is none."""
    return wire.parse_json(await read(request))


def future(ticket: str, model_id: str) -> Response:
    """Answer with the ticket under which a run's result can be asked for."""
    return JSONResponse({"request_id": ticket, "model_id": model_id})
