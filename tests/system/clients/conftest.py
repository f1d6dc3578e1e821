"""The runs of each client, made once."""

from collections.abc import Callable

import pytest

from tests.system.clients.playing import Client, play
from tests.system.clients.results import Runs
from tests.system.clients.stage import Way


@pytest.fixture(scope="module")
def runs() -> Callable[[Client], Runs]:
    """All three runs of a client."""
    made: dict[str, Runs] = {}

    def of(client: Client) -> Runs:
        if client.name not in made:
            made[client.name] = {way: play(client, way) for way in Way}
        return made[client.name]

    return of
