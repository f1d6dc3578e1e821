"""Histories that are appended to, edited, truncated and forked at will: what is forwarded follows from them.

Each message holds a word of its own, and the summary model repeats the words of all that it is shown. So a
summary of anything but a prefix of the request at hand shows: by a word that is absent from the request,
or by words in another order.
"""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.core.summary.call import SummaryAnswer, SummaryCall
from tests.helpers.compaction_bench import RECORD, RUN_MARK, Bench, JsonObject, bench, forwarded
from tests.helpers.summaries import put_as_asked

WINDOW_TOKENS = 1_600
WORD = re.compile(r"zq\d+w")
ECHO = re.compile(r"seen: ([\w ]*)\.")
FILLER = "please look at the ledger again and say what you find there, line by line. " * 3


class Echoing:
    """A summary model that repeats the words of what it is shown, in their order."""

    def __init__(self) -> None:
        self.calls = 0

    async def request_summary(self, call: SummaryCall) -> SummaryAnswer:
        self.calls += 1
        shown = call.prompt
        if call.conversation is not None:
            shown = "\n".join(message.text for message in call.conversation.messages)
        marks = RUN_MARK.findall(shown)
        if not marks:
            return SummaryAnswer(put_as_asked(_echo(shown), call.system, call.prompt))
        parts = RUN_MARK.split(shown)[1:]
        return SummaryAnswer(
            "\n".join(f"{mark}\n{_echo(part, '')}" for mark, part in zip(marks, parts, strict=False))
        )


def _echo(shown: str, record: str = RECORD) -> str:
    words = dict.fromkeys(WORD.findall(shown))
    return f"{record}\n- they said please look at the ledger again, and seen: {' '.join(words)}.\n"


def _is_in_order(words: list[str], order: list[str]) -> bool:
    rest = iter(order)
    return all(word in rest for word in words)


class Histories(RuleBasedStateMachine):
    """Branches of one session of one tenant, all of which share one replica and its store.

    Attributes:
        strategy: Of all requests.
        rounds: Requests that were forwarded with a stand-in, in all runs.
    """

    strategy = "chained"
    rounds = 0

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.model = Echoing()
        self.numbers = count()
        self.branches: list[list[JsonObject]] = []
        self.sent: list[tuple[list[JsonObject], list[JsonObject]]] = []
        self.bench: Bench

    @initialize()
    def begin(self) -> None:
        model: Any = self.model
        made = bench(model, strategy=self.strategy, window=WINDOW_TOKENS)
        self.bench = self.runner.run(self.stack.enter_async_context(made))
        self.branches = [[{"role": "system", "content": "Be brief."}]]
        self.append(0, 16)

    def _message(self, role: str) -> JsonObject:
        return {"role": role, "content": f"zq{next(self.numbers)}w: {FILLER}"}

    def _branch(self, which: int) -> list[JsonObject]:
        return self.branches[which % len(self.branches)]

    @rule(which=st.integers(0, 5), turns=st.integers(1, 6))
    def append(self, which: int, turns: int) -> None:
        branch = self._branch(which)
        for _ in range(turns):
            branch += [self._message("user"), self._message("assistant")]
        self.send(branch)

    @rule(which=st.integers(0, 5), at=st.integers(0, 200))
    def edit(self, which: int, at: int) -> None:
        branch = self._branch(which)
        at = at % len(branch)
        role = branch[at]["role"]
        branch[at] = (
            {"role": role, "content": f"Be very brief, {at}."} if role == "system" else self._message(role)
        )
        self.send(branch)

    @rule(which=st.integers(0, 5), at=st.integers(0, 200))
    def truncate(self, which: int, at: int) -> None:
        branch = self._branch(which)
        del branch[1 + 2 * (at % (len(branch) // 2 + 1)) :]
        self.send(branch)

    @rule(which=st.integers(0, 5), at=st.integers(0, 200), turns=st.integers(1, 12))
    def fork(self, which: int, at: int, turns: int) -> None:
        branch = self._branch(which)
        self.branches.append(branch[: 1 + 2 * (at % (len(branch) // 2 + 1))])
        self.append(len(self.branches) - 1, turns)

    @rule(which=st.integers(0, 5), at=st.integers(0, 200))
    def swap(self, which: int, at: int) -> None:
        branch = self._branch(which)
        if len(branch) >= 5:
            at = 1 + at % (len(branch) - 3)
            branch[at], branch[at + 2] = branch[at + 2], branch[at]
            self.send(branch)

    @rule(at=st.integers(0, 500))
    def send_again(self, at: int) -> None:
        """Any list that was ever sent: what is forwarded now may have been made since, for it or a branch."""
        if self.sent:
            self._fit(self.sent[at % len(self.sent)][0])

    def send(self, branch: list[JsonObject]) -> None:
        """Twice: what was forwarded once is forwarded again, byte for byte."""
        messages = [*map(dict, branch), self._message("user")]
        first = self._fit(messages)
        assert self._fit(messages) == first
        self.sent.append((messages, first))

    def _fit(self, messages: list[JsonObject]) -> list[JsonObject]:
        async def fitted() -> list[JsonObject]:
            fit = await self.bench.answered(messages)
            await self.bench.settled()
            assert fit.report.status != "failed-open", fit.report
            assert len(fit.raw) <= len(json.dumps({"model": "gpt-x", "messages": messages, "seed": 7}))
            return forwarded(fit)

        found = self.runner.run(fitted())
        self._check(messages, found)
        return found

    def _check(self, messages: list[JsonObject], found: list[JsonObject]) -> None:
        incoming = WORD.findall(json.dumps(messages))
        text = json.dumps(found)
        assert set(WORD.findall(text)) <= set(incoming)
        assert messages[-1]["content"] in str(found[-1]["content"])
        instructions = [each for each in messages if each["role"] == "system"]
        ours = self.strategy == "split"  # whose stand-in is a system message, as in its seed
        assert ours or [each for each in found if each["role"] == "system"] == instructions
        echoes = ECHO.findall(text)
        type(self).rounds += bool(echoes)
        assert all(_is_in_order(echo.split(), incoming) for echo in echoes)

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()


@pytest.mark.parametrize("strategy", [name for name, row in STRATEGIES.items() if row.summary])
def test_what_is_forwarded_holds_no_text_of_another_branch(
    strategy: str, pytestconfig: pytest.Config
) -> None:
    slow = pytestconfig.getoption("--runslow")
    machine: Any = type("Machine", (Histories,), {"strategy": strategy, "rounds": 0})
    limits = settings(
        max_examples=60 if slow else 8,
        stateful_step_count=20 if slow else 12,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],  # a failure is told as it was found: to shrink it takes a minute
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=limits)
    assert machine.rounds > 10
