"""Two versions at the same time as replicas on one Redis server, and one version on the store of the other.

A rolling upgrade runs both versions for a while, and a rollback starts the old version on what the new one has
written. In both cases every round is made once and then reused, whichever version made it.
"""

import itertools
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cases import COMPACTING, FIELDS, JSON_TYPE
from doubles import PORT, SUMMARY_MODEL, Provider, Received, Reply, answer, write_answer, write_sections
from golden_conversations import PATHS, Conversation, draw_conversation, write_request
from product import LIMIT_S, LONG_STILL_S, Answered, Headers, Product, run_product
from stores import KINDS, find_waste, make_config, read_stores, run_redis

PARTS = ("alternating", "rollback", "stores")
# Strategies that ask for one summary a round.
STRATEGIES = ("anchored", "full", "split", "chained")
# Long ones, whose results are short enough for one summary a round.
CONVERSATIONS = (105, 125, 140)
QUICK_CONVERSATIONS = (105,)
# A store that does not answer within 0.25 s is left alone, and rounds are made again. On a busy machine that says
# nothing about versions, so what was played is played again, so often at most.
ATTEMPTS = 4
# How many lines are shown of what is wrong with a case.
SHOWN_FAULTS = 6
# Equal first requests that each replica gets at the same time.
CLIENTS = 4
# How long a summary is held once both replicas hold a request, so that the second one waits for it, in seconds.
HOLD_S = 0.5
HOLD_LIMIT_S = 20.0
# A replica may take this long to see a round that another one has made, if its request fits without, in seconds.
FRESH_S = 2.2
# Another address than that of recordings, so that both can run at the same time.
REPLICAS_PORT = PORT + 2


@dataclass(frozen=True)
class Outcome:
    """What a replica made of a request.

    Attributes:
        request: The number of the request within its conversation, from 1.
        replica: The replica that answered.
        code: The status code.
        status: What `x-compaction-status` says.
        reason: What `x-compaction-reason` says.
        round: What `x-compaction-round` says; 0 without it.
        forwarded: The body that reached the provider.
        summaries: How many summaries were asked for, by this request or behind its answer.
    """

    request: int
    replica: str
    code: int
    status: str
    reason: str
    round: int
    forwarded: str
    summaries: int

    def __str__(self) -> str:
        return f"request {self.request} at {self.replica}"


@dataclass
class Report:
    """What was done and what is wrong.

    Attributes:
        commands: Name of a version -> its command; "old" and "new".
        numbers: The conversations that are played.
        faults: A line for each thing that is wrong.
        outcomes: Name of a case -> its outcomes.
        timeouts: How often a store has not answered in time.
    """

    commands: Mapping[str, str]
    numbers: Sequence[int]
    faults: list[str] = field(default_factory=list)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    timeouts: int = 0

    def add(self, name: str, outcomes: list[Outcome], faults: list[str]) -> None:
        """Keep the outcomes of a case and what is wrong with them."""
        self.outcomes[name] = outcomes
        self.faults += [f"{name}: {each}" for each in faults[:SHOWN_FAULTS]]
        more = len(faults) - SHOWN_FAULTS
        self.faults += [f"{name}: … and {more} more"] * (more > 0)

    def cases(self) -> dict[str, dict[str, Any]]:
        """Returns the cases as JSON can hold them."""
        return {
            f"replicas/{name}": {"outcomes": [asdict(each) for each in outcomes]}
            for name, outcomes in self.outcomes.items()
        }


def _write_answer(request: Received) -> Reply:
    """Answer a request; no summary fails."""
    if request.read().get("model") == SUMMARY_MODEL:
        return write_answer(request, write_sections(request))
    return answer(request)


@contextmanager
def _run_replicas(
    report: Report, provider: Provider, config: Mapping[str, Any], *names: str, is_ahead: bool = False
) -> Iterator[dict[str, Product]]:
    """Run these versions at the same time with one configuration; they are told to end when the block ends.

    Args:
        report: Knows the commands.
        provider: The provider's double.
        config: The configuration of a store.
        names: The versions.
        is_ahead: Whether a strategy that makes rounds ahead of need does so.
    """
    more = {
        "compaction": {**COMPACTING["compaction"], "strategies": FIELDS},
        # The window of the summary model is large, so that a round takes one summary.
        "models": {SUMMARY_MODEL: {"window": 200_000}, **COMPACTING["models"]},
    }
    if is_ahead:
        more["compaction"]["background"] = None
    with ExitStack() as stack:
        products = {
            name: stack.enter_context(
                run_product(provider, {**config, **more}, command=report.commands[name])
            )
            for name in names
        }
        yield products
        for name, each in products.items():
            each.settle(LONG_STILL_S)
            each.stop()
            failures = Counter(line.get("reason") for line in each.proxy.log_lines("store.failed"))
            report.timeouts += failures.pop("store-timeout", 0)
            report.faults += [
                f"{name}: the store failed {count} times: {why}" for why, count in failures.items()
            ]


def _list_stops(conversation: Conversation) -> list[int]:
    """How many messages each request has: one for each user message, and one for the results of each answer."""
    following = [each.role for each in conversation.messages[1:]] + [""]
    return [
        count
        for count, (each, after) in enumerate(zip(conversation.messages, following, strict=True), 1)
        if each.role == "user" or (each.role == "tool" and after != "tool")
    ]


def _make_headers(name: str, strategy: str) -> Headers:
    """Returns the headers of a conversation that has a credential, so a tenant, of its own."""
    return [
        ("authorization", f"Bearer sk-{name.replace(' ', '-')}"),
        ("x-session-id", name),
        ("x-compaction-strategy", strategy),
        JSON_TYPE,
    ]


def _list_received(provider: Provider, headers: Headers, *, are_summaries: bool) -> list[Received]:
    """The requests of a conversation that have reached the provider: those for summaries, or the others."""
    credential = dict(headers)["authorization"]
    return [
        each
        for each in provider.received
        if each.header("authorization") == credential
        and (each.read().get("model") == SUMMARY_MODEL) is are_summaries
    ]


def _ask(
    provider: Provider,
    products: Mapping[str, Product],
    replica: str,
    headers: Headers,
    number: int,
    body: bytes,
) -> Outcome:
    """Send a request to a replica, and wait until all of them rest."""
    before = len(provider.received)
    answered = products[replica].request("POST", PATHS["chat"], headers, body)
    for each in products.values():
        each.settle()
    received = provider.received[before:]
    forwarded = [each.body.decode() for each in received if each.read().get("model") != SUMMARY_MODEL]
    return _describe(answered, number, replica, "\n".join(forwarded), len(received) - len(forwarded))


def _describe(
    answered: Answered, number: int, replica: str, forwarded: str = "", summaries: int = 0
) -> Outcome:
    return Outcome(
        number,
        replica,
        answered.status,
        answered.header("x-compaction-status"),
        answered.header("x-compaction-reason"),
        int(answered.header("x-compaction-round") or 0),
        forwarded,
        summaries,
    )


def _play(
    provider: Provider,
    products: Mapping[str, Product],
    name: str,
    strategy: str,
    number: int,
    choose: Callable[[int], Sequence[str]],
) -> tuple[list[Outcome], list[Received]]:
    """Play a conversation; returns what came of each request, and the requests for summaries.

    Args:
        provider: The provider's double.
        products: The replicas.
        name: Names the conversation and its tenant.
        strategy: Its strategy.
        number: The number of the conversation.
        choose: Gives the replicas that a request goes to, one after another, by its number. A replica that has not
            seen the last round yet gets it again.
    """
    conversation = draw_conversation(number)
    headers = _make_headers(name, strategy)
    before = len(_list_received(provider, headers, are_summaries=True))
    outcomes: list[Outcome] = []
    for request, stop in enumerate(_list_stops(conversation), 1):
        body = write_request("chat", conversation.messages[:stop])
        for replica in choose(request):
            outcome = _ask(provider, products, replica, headers, request, body)
            if outcome.round < max((each.round for each in outcomes), default=0):
                time.sleep(FRESH_S)
                again = _ask(provider, products, replica, headers, request, body)
                outcome = replace(again, summaries=outcome.summaries + again.summaries)
            outcomes.append(outcome)
    return outcomes, _list_received(provider, headers, are_summaries=True)[before:]


def find_repeats(
    outcomes: Sequence[Outcome], summaries: Sequence[bytes], *, is_ahead: bool = False
) -> list[str]:
    """Returns a line for each round that was made twice or was not reused, in a conversation that grows.

    Args:
        outcomes: What came of its requests, in their order.
        summaries: The bodies of the requests for its summaries.
        is_ahead: Whether rounds are made ahead of need. Then a request may apply two rounds at once, and no request
            may have needed the last one yet.
    """
    lines = _find_failures(outcomes)
    first: dict[int, Outcome] = {}
    for each in outcomes:
        last = max(first, default=0)
        if each.status == "applied" and each.round in first:
            lines.append(f"round {each.round} was made for {first[each.round]} and again for {each}")
        elif each.status == "applied":
            first[each.round] = each
            if each.round <= last or (each.round > last + 1 and not is_ahead):
                lines.append(f"{each} applies round {each.round} after round {last}")
        elif last and each.status != "reused":
            lines.append(f"{each} does not reuse round {last}: {_say_status(each)}")
        elif each.round != last:
            lines.append(f"{each} reuses round {each.round}, and the last one is {last}")
    rounds = max(first, default=0)
    if len(summaries) - rounds not in ({0, 1} if is_ahead else {0}):
        lines.append(f"{len(summaries)} summaries were asked for, and there are {rounds} rounds")
    repeated = sum(count - 1 for count in Counter(summaries).values())
    lines += [f"{repeated} summaries were asked for with the same bytes as another"] * bool(repeated)
    if not first:
        lines.append("no round was made")
    return lines


def _find_failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns a line for each request that failed."""
    return [f"{each} was answered with {each.code}" for each in outcomes if each.code != 200]


def _say_status(outcome: Outcome) -> str:
    return f"{outcome.status or 'no status'} {outcome.reason}".strip()


def count_directions(outcomes: Sequence[Outcome]) -> Counter[tuple[str, str]]:
    """Returns how many requests used a round of another replica, by (who made it, who used it).

    A round that a replica has made, too, is its own. A round made ahead of need belongs to the last replica that
    asked for a summary.
    """
    found: Counter[tuple[str, str]] = Counter()
    makers: dict[int, set[str]] = {}
    ahead: list[str] = []  # who has asked for a summary that no request has used yet
    for each in outcomes:
        own = makers.setdefault(each.round, set())
        if each.status == "reused" and each.replica not in own:
            found.update((maker, each.replica) for maker in own)
        if each.status != "applied":
            ahead += [each.replica] * each.summaries
            continue
        is_foreign = not each.summaries and ahead and each.replica not in ahead
        own.add(ahead[-1] if is_foreign else each.replica)
        found.update([(ahead[-1], each.replica)] if is_foreign else [])
        ahead = []
    return found


def play_alternating(report: Report, provider: Provider, kind: str, *, is_ahead: bool = False) -> None:
    """Have conversations grow with their requests alternating between two replicas on one Redis server.

    Each is played twice: it starts at either replica. Its last request goes to both, which forward the same bytes.
    """
    with tempfile.TemporaryDirectory(prefix="goldens-") as made, run_redis(Path(made)) as server:
        config = make_config(kind, server.url)
        with _run_replicas(report, provider, config, "old", "new", is_ahead=is_ahead) as products:
            if is_ahead:  # no other strategy does that by default
                _play_strategy(report, provider, products, f"{kind}, ahead,", "anchored", is_ahead=True)
                return
            for strategy in STRATEGIES:
                _play_strategy(report, provider, products, kind, strategy)
            for strategy in STRATEGIES:
                _ask_at_once(report, provider, products, kind, strategy)


def _play_strategy(
    report: Report,
    provider: Provider,
    products: Mapping[str, Product],
    kind: str,
    strategy: str,
    *,
    is_ahead: bool = False,
) -> None:
    names = list(products)
    reused: Counter[tuple[str, str]] = Counter()
    requests = rounds = asked = 0
    for number, start in itertools.product(report.numbers, range(2)):
        last = len(_list_stops(draw_conversation(number)))

        def choose(request: int, start: int = start, last: int = last) -> list[str]:
            first = (request - 1 + start) % 2
            return [names[first], names[1 - first]] if request == last else [names[first]]

        name = f"{kind} {strategy} {number} from {names[start]}"
        outcomes, summaries = _play(provider, products, name, strategy, number, choose)
        faults = find_repeats(outcomes, [each.body for each in summaries], is_ahead=is_ahead)
        if outcomes[-1].forwarded != outcomes[-2].forwarded:
            faults.append(f"{outcomes[-2]} and {outcomes[-1]} forward different bytes")
        report.add(name, outcomes, faults)
        reused += count_directions(outcomes)
        requests += len(outcomes)
        rounds += max(each.round for each in outcomes)
        asked += len(summaries)
    said = []
    for maker, reader in (("old", "new"), ("new", "old")):
        count = reused[maker, reader]
        said.append(f"{reader} used rounds of {maker} {count} times")
        if not count:
            report.faults.append(f"{kind} {strategy}: {reader} has used no round of {maker}")
    print(
        f"{kind} {strategy}: {2 * len(report.numbers)} conversations, {requests} requests, {rounds} rounds, "
        f"{asked} summaries; {', '.join(said)}",
        flush=True,
    )


def _is_holding(replica: Product) -> bool:
    """Whether a replica holds the body of a request."""
    with replica.proxy.client() as client:
        lines = client.get("/metrics").text.splitlines()
    return any("inflight_body_bytes" in line and float(line.split()[-1]) for line in lines if line[0] != "#")


def _ask_at_once(
    report: Report, provider: Provider, products: Mapping[str, Product], kind: str, strategy: str
) -> None:
    """Send equal first requests to both replicas at the same time: one summary is made, and all use it."""
    name = f"{kind} {strategy} at once"
    headers = _make_headers(name, strategy)
    number = report.numbers[0]
    grown = report.outcomes[f"{kind} {strategy} {number} from old"]
    # The first request of that conversation that needs a round: it takes one summary.
    request = next((each.request for each in grown if each.status == "applied"), 0)
    if not request:
        report.add(name, [], ["there is no request that needs a round"])
        return
    conversation = draw_conversation(number)
    stop = _list_stops(conversation)[request - 1]
    body = write_request("chat", conversation.messages[:stop])
    barrier = threading.Barrier(CLIENTS * len(products))
    holding: list[bool] = []

    def hold() -> None:
        """Wait until both replicas hold a request."""
        deadline = time.monotonic() + HOLD_LIMIT_S
        while not (is_held := all(map(_is_holding, products.values()))) and time.monotonic() < deadline:
            time.sleep(0.05)
        holding.append(is_held)
        time.sleep(HOLD_S)

    def reply(request: Received) -> Reply:
        made = _write_answer(request)
        is_summary = request.read().get("model") == SUMMARY_MODEL
        return Reply(made.status, made.body, made.headers, before=hold) if is_summary else made

    def ask(replica: str) -> Outcome:
        client = Product(products[replica].proxy, provider)
        barrier.wait(LIMIT_S)
        try:
            answered = client.request("POST", PATHS["chat"], headers, body, is_settled=False)
        finally:
            client.drop_connection()
        return _describe(answered, request, replica)

    provider.answer = reply
    with ThreadPoolExecutor(CLIENTS * len(products)) as pool:
        outcomes = list(pool.map(ask, list(products) * CLIENTS))
    provider.answer = _write_answer
    for each in products.values():
        each.settle()
    summaries = _list_received(provider, headers, are_summaries=True)
    forwarded = {each.body for each in _list_received(provider, headers, are_summaries=False)}
    faults = _find_failures(outcomes)
    faults += [
        f"{each}: {_say_status(each)}, round {each.round}"
        for each in outcomes
        if each.status not in {"applied", "reused"} or each.round != 1
    ]
    if len(summaries) != 1:
        faults.append(f"{len(summaries)} summaries were asked for, not one")
    if len(forwarded) != 1:
        faults.append(f"{len(forwarded)} different bodies were forwarded, not one")
    if not all(holding):
        faults.append("the replicas did not hold the requests at the same time")
    report.add(name, outcomes, faults)
    used = Counter(f"{each.status} at {each.replica}" for each in outcomes)
    print(
        f"{name}: {len(outcomes)} equal requests, {len(summaries)} summaries; "
        + ", ".join(f"{count} {what}" for what, count in sorted(used.items())),
        flush=True,
    )


def roll_back(report: Report, provider: Provider, kind: str) -> None:
    """Have the new version write a store of its own, and send the same requests to the old version on it."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="goldens-")))
        url = f"sqlite:///{place / 'state.db'}"
        if kind.startswith("redis"):
            url = stack.enter_context(run_redis(place)).url
        written = _play_alone(report, provider, kind, url, "new")
        read = _play_alone(report, provider, kind, url, "old")
    rounds = made = reused = asked = 0
    for name, (outcomes, summaries) in written.items():
        report.add(f"{name}, new", outcomes, find_repeats(outcomes, [each.body for each in summaries]))
        again, more = read[name]
        report.add(f"{name}, old", again, find_losses(outcomes, again, len(more)))
        rounds += sum(each.status == "applied" for each in outcomes)
        made += len(summaries)
        reused += sum(each.status == "reused" for each in again)
        asked += len(more)
    print(
        f"rollback {kind}: {len(written)} conversations, new made {rounds} rounds with {made} summaries; "
        f"{reused} requests to old reused them, and it asked for {asked} summaries",
        flush=True,
    )


def _play_alone(
    report: Report, provider: Provider, kind: str, url: str, replica: str
) -> dict[str, tuple[list[Outcome], list[Received]]]:
    """Play all conversations at one version with that store; returns outcomes and summaries by conversation."""
    found = {}
    with _run_replicas(report, provider, make_config(kind, url), replica) as products:
        for strategy, number in itertools.product(STRATEGIES, report.numbers):
            name = f"rollback {kind} {strategy} {number}"
            found[name] = _play(provider, products, name, strategy, number, lambda _: [replica])
    return found


def find_losses(written: Sequence[Outcome], read: Sequence[Outcome], summaries: int) -> list[str]:
    """Returns a line for each request that did not reuse a round when it was sent again.

    Args:
        written: What came of the requests at the version that has written the store.
        read: What came of them at the version that has read it.
        summaries: How many summaries the latter has asked for.
    """
    lines = _find_failures(read)
    for one, other in zip(written, read, strict=True):
        if one.round and (other.status != "reused" or other.round < one.round):
            lines.append(f"{other} does not reuse round {one.round}: {_say_status(other)}, {other.round}")
        elif other.status not in {"reused", "none"}:
            lines.append(f"{other}: {_say_status(other)}")
    if written[-1].forwarded != read[-1].forwarded:
        lines.append(f"{written[-1]} and {read[-1]} forward different bytes")
    lines += [f"{summaries} summaries were asked for"] * bool(summaries)
    return lines


def read_kept_stores(report: Report, provider: Provider, folder: Path) -> None:
    """Start the new version on the stores in a folder; it reuses every round."""
    found = {}
    for kind, parts in read_stores(provider, folder, report.commands["new"]):
        found[f"{folder.name} {kind}"] = parts
        print(
            f"{folder.name} {kind}, read by new: {len(parts['statuses'])} requests, "
            f"{parts['summaries']} summaries",
            flush=True,
        )
    report.faults += find_waste(found) if found else [f"there are no stores in {folder}"]


def _play_in_time(report: Report, provider: Provider, play: Callable[[], None]) -> None:
    """Play something, and again if faults were found while a store did not answer in time."""
    known = len(report.faults)
    for attempt in range(ATTEMPTS):
        del report.faults[known:]
        report.timeouts = 0
        provider.received.clear()
        play()
        if not report.timeouts or len(report.faults) == known:
            return
        print(f"attempt {attempt + 1}: the store did not answer in time {report.timeouts} times", flush=True)
    report.faults.append(f"the store did not answer in time in any of {ATTEMPTS} attempts")


def compare_replicas(
    commands: Mapping[str, str], kept: Sequence[Path], only: Sequence[str] = (), *, is_quick: bool
) -> Report:
    """Run two versions as replicas, and each on what the other has written.

    Args:
        commands: The commands of the "old" and the "new" version.
        kept: Folders with stores that older versions have written.
        only: Which of `PARTS` to run; empty: all.
        is_quick: Whether fewer conversations are played.
    """
    report = Report(commands, QUICK_CONVERSATIONS if is_quick else CONVERSATIONS)
    parts = set(only or PARTS)
    if unknown := parts.difference(PARTS):
        raise ValueError(f"no such part: {', '.join(sorted(unknown))}")
    with closing(Provider(_write_answer, REPLICAS_PORT)) as provider:
        for kind in KINDS:
            if "alternating" in parts and kind.startswith("redis"):
                _play_in_time(report, provider, partial(play_alternating, report, provider, kind))
                ahead = partial(play_alternating, report, provider, kind, is_ahead=True)
                _play_in_time(report, provider, ahead)
        for kind in KINDS:
            if "rollback" in parts:
                _play_in_time(report, provider, partial(roll_back, report, provider, kind))
    if "stores" in parts:
        # The tenants of a kept store are those of the address that the provider had then.
        with closing(Provider(answer)) as provider:
            for folder in kept:
                read_kept_stores(report, provider, folder)
    return report
