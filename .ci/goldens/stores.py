"""Stores that another version has written: SQLite files and what a Redis server held, plain and sealed.

A store is written by the installed command and kept packed. It is read by starting the command on a copy of it
and sending the same requests again: every round is reused, and no summary is asked for.
"""

import base64
import json
import lzma
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cases import COMPACTING, JSON_TYPE
from doubles import SUMMARY_MODEL, Provider
from golden_conversations import PATHS, WIRES, draw_conversation, write_request
from product import LONG_STILL_S, Product, run_product

from tests.helpers.redis_servers import RedisServer
from tests.system.black_box import COMMAND

SEAL = base64.b64encode(b"golden-key-of-thirty-two-bytes!!").decode()
_ESTIMATE = re.compile(r"^x-compaction-(tokens-|until-trigger-)")
CONVERSATIONS = (9,)
KINDS = ("sqlite-plain", "sqlite-sealed", "redis-plain", "redis-sealed")


def make_config(kind: str, url: str) -> dict[str, Any]:
    """Returns the configuration of a product with a store of that kind at that URL."""
    store: dict[str, Any] = {"url": url, "ttl": "36500d"}
    store |= {"encryption_keys": [SEAL]} if kind.endswith("sealed") else {}
    return {**COMPACTING, "store": store}


def _play(product: Product, *, last_only: bool) -> None:
    """Send the requests of some conversations on all wires; or only the last one of each."""
    for number in CONVERSATIONS:
        conversation = draw_conversation(number)
        for wire in WIRES:
            headers = [
                ("authorization", f"Bearer sk-golden-{number}"),
                JSON_TYPE,
                ("x-session-id", f"store-{number}"),
            ]
            for stop in conversation.stops[-1:] if last_only else conversation.stops:
                body = write_request(wire, conversation.messages[:stop])
                product.ask(f"{number} {wire} {stop}", "POST", PATHS[wire], headers, body)


@contextmanager
def run_redis(folder: Path, records: list[Any] | None = None) -> Iterator[RedisServer]:
    """Run a Redis server that holds these records."""
    server = RedisServer(folder)
    try:
        for key, kind, value in records or []:
            _restore(server, base64.b64decode(key), kind, value)
        yield server
    finally:
        server.close()


def _dump(server: RedisServer) -> list[Any]:
    """All records of a server: key, type and value; no times to live."""
    admin = server.admin
    found = []
    for key in sorted(admin.keys("*")):
        kind = admin.type(key).decode()
        value: Any
        if kind == "string":
            value = _encode(admin.get(key))
        elif kind == "hash":
            value = [[_encode(name), _encode(each)] for name, each in sorted(admin.hgetall(key).items())]
        elif kind == "zset":
            value = [[_encode(name), score] for name, score in admin.zrange(key, 0, -1, withscores=True)]
        elif kind == "set":
            value = [_encode(each) for each in sorted(admin.smembers(key))]
        elif kind == "list":
            value = [_encode(each) for each in admin.lrange(key, 0, -1)]
        else:
            raise ValueError(f"{key!r} is a {kind}")
        found.append([_encode(key), kind, value])
    return found


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _restore(server: RedisServer, key: bytes, kind: str, value: Any) -> None:
    admin, decode = server.admin, base64.b64decode
    if kind == "string":
        admin.set(key, decode(value))
    elif kind == "hash":
        admin.hset(key, mapping={decode(name): decode(each) for name, each in value})
    elif kind == "zset":
        admin.zadd(key, {decode(name): score for name, score in value})
    elif kind == "set":
        admin.sadd(key, *map(decode, value))
    else:
        admin.rpush(key, *map(decode, value))


def write_stores(provider: Provider, folder: Path) -> None:
    """Have the installed command write a store of each kind, and pack them into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="goldens-") as made:
            place = Path(made)
            if kind.startswith("redis"):
                with run_redis(place) as server:
                    with run_product(provider, make_config(kind, server.url)) as product:
                        _fill(product)
                    data = json.dumps(_dump(server)).encode()
            else:
                path = place / "state.db"
                with run_product(provider, make_config(kind, f"sqlite:///{path}")) as product:
                    _fill(product)
                connection = sqlite3.connect(path)
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                connection.execute("PRAGMA journal_mode=DELETE")
                connection.execute("VACUUM")
                connection.close()
                data = path.read_bytes()
        (folder / f"{kind}.xz").write_bytes(lzma.compress(data, preset=9))


def _fill(product: Product) -> None:
    _play(product, last_only=False)
    product.settle(LONG_STILL_S)
    product.stop()


def read_stores(
    provider: Provider, folder: Path, command: str = COMMAND
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields what the installed command makes of each store in the folder: its kind, and the parts of a case."""
    for packed in sorted(folder.glob("*.xz")):
        kind = packed.name.removesuffix(".xz")
        data = lzma.decompress(packed.read_bytes())
        with tempfile.TemporaryDirectory(prefix="goldens-") as made:
            place = Path(made)
            if kind.startswith("redis"):
                with run_redis(place, json.loads(data)) as server:
                    yield kind, _reuse(provider, make_config(kind, server.url), command)
            else:
                path = place / "state.db"
                path.write_bytes(data)
                path.chmod(0o600)
                yield kind, _reuse(provider, make_config(kind, f"sqlite:///{path}"), command)


def find_waste(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns a line for each store of which a round was not reused; other cases are skipped."""
    lines = []
    for name, case in cases.items():
        if "summaries" not in case:
            continue
        lines += [f"{name}: {case['summaries']} summaries were asked for"] * bool(case["summaries"])
        made = [label for label, status in case["statuses"].items() if status != "reused"]
        lines += [f"{name}: nothing was reused for {', '.join(made)}"] * bool(made)
        lines += [f"{name}: no request was sent"] * (not case["statuses"])
    return lines


def _reuse(provider: Provider, config: dict[str, Any], command: str) -> dict[str, Any]:
    before = len(provider.received)
    with run_product(provider, config, command=command) as product:
        _play(product, last_only=True)
        product.settle(LONG_STILL_S)
        product.stop()
        received = provider.received[before:]
        summaries = sum(each.read().get("model") == SUMMARY_MODEL for each in received)
        statuses = {
            label: dict(each["headers"]).get("x-compaction-status")
            for label, each in product.responses.items()
        }
        for each in product.responses.values():  # estimates learn from answers, and forget that after a day
            each["headers"] = [
                [name, "<estimate>" if _ESTIMATE.search(name) else value] for name, value in each["headers"]
            ]
        return {
            "summaries": summaries,
            "statuses": statuses,
            "responses": product.responses,
            "forwarded": product.forwarded,
        }
