"""Weights that leave the service: their encryption, and the addresses from which their files are fetched.

An address carries its own permission, so that any program that was given it can fetch that one file for a while.
"""

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pyrage  # type: ignore[import-untyped]

from tinker_local.errors import ForbiddenError, InvalidRequestError

FILES_PATH = "/local/v1/files/"
ENCRYPTED_SUFFIX = ".age"
_ADDRESS_SECONDS = 3600
_MOST_RECIPIENTS = 10

_age: Any = pyrage


def check_recipients(recipients: Sequence[object]) -> tuple[str, ...]:
    """Return age recipients (`age1...` or an SSH public key) if they can be encrypted to.

    Raises InvalidRequestError otherwise.
    """
    if len(recipients) > _MOST_RECIPIENTS:
        raise InvalidRequestError(f"{len(recipients)} age recipients are given: {_MOST_RECIPIENTS} at most")
    checked = tuple(str(recipient) for recipient in recipients)
    for recipient in checked:
        _recipient(recipient)
    return checked


def _recipient(text: str) -> Any:
    kind = _age.x25519 if text.startswith("age1") else _age.ssh
    try:
        return kind.Recipient.from_str(text)
    except _age.RecipientError as error:
        raise InvalidRequestError(
            f"no age recipient: {text}: give a key that starts with 'age1' or an SSH public key ({error})"
        ) from error


def encrypt_files(folder: Path, recipients: Sequence[str]) -> None:
    """Put every file of the folder behind age encryption, under its name with `.age` at the end."""
    keys = [_recipient(recipient) for recipient in recipients]
    for file in list(folder.iterdir()):
        _age.encrypt_file(str(file), f"{file}{ENCRYPTED_SUFFIX}", keys)
        file.unlink()


class Addresses:
    """Signs the addresses of files. They hold for an hour, and not beyond a restart of the service."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def sign(self, base_url: str, checkpoint_path: str, files: Sequence[str]) -> tuple[dict[str, str], int]:
        """Return the address of each of a checkpoint's files, and when they expire in seconds since 1970."""
        expires = int(time.time()) + _ADDRESS_SECONDS
        urls = {}
        for file in files:
            place = f"{checkpoint_path.removeprefix('tinker://')}/{file}"
            query = urlencode({"expires": expires, "signature": self._signature(place, str(expires))})
            urls[file] = f"{base_url.rstrip('/')}{FILES_PATH}{quote(place)}?{query}"
        return urls, expires

    def check(self, place: str, expires: str, signature: str) -> None:
        """Raise ForbiddenError unless this service signed that place and the time is not over."""
        if not hmac.compare_digest(signature.encode(), self._signature(place, expires).encode()):
            raise ForbiddenError("this address was not given by this service since its start: ask for a new one")
        if int(expires) < time.time():
            raise ForbiddenError("this address has expired: ask for a new one")

    def _signature(self, place: str, expires: str) -> str:
        return hmac.new(self._secret, f"{expires} {place}".encode(), hashlib.sha256).hexdigest()
