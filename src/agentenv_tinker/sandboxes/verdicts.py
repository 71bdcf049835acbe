"""How an episode went, told to whoever keeps its containers: only those of one that went well may be used again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_keepers: list[Callable[[str, bool], None]] = []
_expected = False


def expect() -> None:
    """Say that every episode of this process ends with a verdict, for which a container may be kept a while."""
    global _expected
    _expected = True


def expected() -> bool:
    """Whether verdicts come. They don't where episodes are played past this package, as the framework's CLI does."""
    return _expected


def tell(sandbox_ids: Iterable[str], *, went_well: bool) -> None:
    """Say whether the episode that had these sandboxes went well. Doesn't block; unknown ids are nobody's."""
    for sandbox_id in sandbox_ids:
        for keeper in _keepers:
            keeper(sandbox_id, went_well)


def listen(keeper: Callable[[str, bool], None]) -> None:
    """Have `keeper` called with every sandbox id and verdict from now on."""
    _keepers.append(keeper)
