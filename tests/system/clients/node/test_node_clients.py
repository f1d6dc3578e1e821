"""Clients in JavaScript see no difference, and their providers none either, until compaction is needed."""

from collections.abc import Callable

import pytest

from tests.system.clients.comparing import compacted, untouched, was_compacted
from tests.system.clients.node.node_clients import NODE, QUICK
from tests.system.clients.playing import Client
from tests.system.clients.results import Runs
from tests.system.clients.stage import Way

# Three runs on a busy machine.
SLOW = [pytest.mark.slow, pytest.mark.timeout(800)]
CLIENTS = [pytest.param(client, id=client.name) for client in QUICK]
CLIENTS += [pytest.param(client, id=client.name, marks=SLOW) for client in NODE]


@pytest.mark.parametrize("client", CLIENTS)
def test_nothing_differs_where_nothing_is_compacted(client: Client, runs: Callable[[Client], Runs]) -> None:
    done = runs(client)
    direct, proxied = done[Way.DIRECT], done[Way.PROXY]
    assert {name.partition("/")[0] for name in direct} == set(client.wires)
    assert list(direct) == list(proxied)
    assert {name: wrong for name in direct if (wrong := untouched(direct[name], proxied[name]))} == {}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_long_conversation_goes_on_through_a_small_window(
    client: Client, runs: Callable[[Client], Runs]
) -> None:
    done = runs(client)
    direct, narrow = done[Way.DIRECT], done[Way.COMPACTED]
    assert {name: wrong for name in direct if (wrong := compacted(direct[name], narrow[name]))} == {}
    growing = {f"{wire}/growing" for wire in client.wires}
    assert {name for name in narrow if was_compacted(narrow[name])} >= growing
