"""What passes the gate could not have been compacted, whatever its bytes are."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from compaction_proxy.compaction.checkpoint_index import CheckpointIndex
from compaction_proxy.compaction.compacted_conversations import CompactedConversations
from compaction_proxy.compaction.directives import DirectiveStore
from compaction_proxy.compaction.message_reader import MessageReader
from compaction_proxy.compaction.request_loader import RequestLoader
from compaction_proxy.compaction.types import CompactionMode, FitRequest
from compaction_proxy.config.config import Config, get_model_settings
from compaction_proxy.core.errors import StoreUnavailableError
from compaction_proxy.gateway.size_gate import MAX_BYTES, SizeGate
from compaction_proxy.providers.model_limits import ModelLimits
from compaction_proxy.providers.token_counting import TokenScheduler
from compaction_proxy.providers.usage_baseline import UsageBaselineStore
from compaction_proxy.storage.memory import MemoryStore
from compaction_proxy.storage.records import RecordStore
from compaction_proxy.wires.body import parse_body
from compaction_proxy.wires.chat.wire import CHAT
from tests.helpers.compaction_bench import mark

ORIGIN, TENANT = "https://up.test:443", "t"
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
MOST_FILLER = 32_768
KEPT_S = 60.0


def ignored(_: StoreUnavailableError) -> None:
    """A memory store does not fail."""


class Bytes:
    """The worst tokenizer there can be: one token a byte."""

    def count(self, text: str, model: str) -> int:
        return len(text.encode("utf-8", "surrogatepass"))

    def count_each(self, texts: Sequence[str], model: str) -> list[int]:
        return [self.count(text, model) for text in texts]


READING = MessageReader({"tiktoken": TokenScheduler(Bytes())})


class Entrance:
    """A gate, and the full count of what stands behind it."""

    def __init__(self, **sections: Any) -> None:
        records = RecordStore(MemoryStore(), ignored)
        self.config = Config.model_validate(sections)
        self.learning = ModelLimits(records)
        self.wishing = DirectiveStore(records, KEPT_S)
        self.compacted = CompactedConversations(records, KEPT_S)
        self.gate = SizeGate(self.config, self.learning, self.wishing, self.compacted, ORIGIN)
        self._viewer = RequestLoader(
            READING,
            records,
            CheckpointIndex(records),
            self.learning,
            UsageBaselineStore(records),
            self.wishing,
        )

    def passes(self, raw: bytes, deployment: str | None = None, conversation: str | None = None) -> bool:
        return self.gate.can_pass(raw, self.gate.find_candidate_models(raw, deployment), TENANT, conversation)

    async def due(self, raw: bytes, deployment: str | None = None) -> str | None:
        """Why a body would have to be compacted, or None, by its full count."""
        body = parse_body(raw, CHAT)
        model = deployment or body.model
        asked = get_model_settings(self.config, model)
        ask = FitRequest(body, model, TENANT, None, ORIGIN, asked, CompactionMode.ACTIVE, None, tuple, None)
        return (await self._viewer.load_view(ask)).find_due_reason()


FILLERS = st.sampled_from(["a", " ", "é", "中", "🐎", "\n", '"', "\\", "\x01", "\ud800", '"model":"n"', "[]"])
TEXTS = st.text(max_size=12)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "odd"]), "content": TEXTS}),
        st.fixed_dictionaries(
            {
                "role": st.just("user"),
                "name": TEXTS,
                "content": st.lists(TEXTS.map(lambda t: {"type": "text", "text": t})),
            }
        ),
        st.builds(
            lambda name, arguments: {
                "role": "assistant",
                "tool_calls": [{"id": "c", "function": {"name": name, "arguments": arguments}}],
            },
            TEXTS,
            TEXTS,
        ),
        st.just({}),
    ),
    max_size=5,
)
MEMBERS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(0, 4_000),
        "max_completion_tokens": st.integers(0, 4_000) | st.none(),
        "tools": st.lists(st.fixed_dictionaries({"function": st.dictionaries(TEXTS, TEXTS)})),
        "metadata": st.fixed_dictionaries({"model": st.sampled_from("mn"), "max_tokens": st.integers()}),
    },
)  # fmt: skip
LIMITS = st.fixed_dictionaries(
    {"window": st.integers(4_000, 9_000)}, optional={"reserve_output": st.integers(0, 1_000)}
)
SIZES = {
    "tokens": st.integers(1_000, 9_000),
    "percent": st.integers(30, 100),
    "percent_of_window": st.integers(30, 100),
}
ROWS = st.sampled_from(sorted(SIZES)).flatmap(
    lambda name: st.fixed_dictionaries({name: SIZES[name]}, optional={"messages": st.integers(1, 4)})
)
TRIGGERS = st.none() | st.lists(ROWS, min_size=1, max_size=2)


@UNHURRIED
@given(
    messages=MESSAGES,
    members=MEMBERS,
    filler=FILLERS,
    limits=LIMITS,
    trigger=TRIGGERS,
    learned=st.none() | st.integers(4_000, 9_000),
    actuals=st.lists(st.integers(350, 1_800), max_size=3),
    ascii_only=st.booleans(),
)
async def test_the_largest_body_that_passes_is_not_due_by_its_full_count(
    messages: list[Any],
    members: dict[str, Any],
    filler: str,
    limits: dict[str, int],
    trigger: list[Any] | None,
    learned: int | None,
    actuals: list[int],
    ascii_only: bool,  # noqa: FBT001 - drawn by name
) -> None:
    entrance = Entrance(models={"m": limits}, compaction={"trigger": trigger})
    for actual in actuals:
        await entrance.learning.learn_token_count(TENANT, ORIGIN, "m", 1_000, actual)
    if learned:
        await entrance.learning.learn_window(TENANT, ORIGIN, "m", learned)

    def body(size: int) -> bytes:
        said = [*messages, {"role": "user", "content": filler * size}]
        asked = {"model": "m", "messages": said, **members}
        text = json.dumps(asked, ensure_ascii=ascii_only, separators=(",", ":"))
        return text.encode("utf-8", "replace")  # a lone surrogate can only come as an escape

    low, high = 0, MOST_FILLER
    assume(entrance.passes(body(low)))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if entrance.passes(body(middle)) else (low, middle - 1)
    assert await entrance.due(body(low)) is None


@pytest.fixture
def entrance() -> Entrance:
    return Entrance(
        models={
            "small": {"window": 2_000},
            "large*": {"window": 100_000},
            "off": {"window": 2_000, "compaction": {"trigger": 0}},
            "counts": {"compaction": {"trigger": [{"messages": 100}]}},
        }
    )


SIZED_BYTES = 26_000


def sized(**members: Any) -> bytes:
    """A body of 26,000 bytes: over the trigger of `small`, under that of `large`."""
    return json.dumps({"messages": [{"role": "user", "content": "?"}], **members}).encode().ljust(SIZED_BYTES)


def verdict(entrance: Entrance, raw: bytes) -> str:
    return "passes" if entrance.passes(raw) else "is read"


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"model": "large"}, "passes"),
        ({"model": "small"}, "is read"),
        ({"model": "large", "metadata": {"model": "small"}}, "is read"),  # any may be the one
        ({"model": "large", "user": '"model":"small"'}, "passes"),  # a text that looks like a member
        ({"model": "unknown"}, "passes"),  # 128,000 tokens
        ({}, "is read"),  # whose window could be any
        ({"model": 7}, "is read"),
        ({"metadata": {"model": "large"}}, "passes"),
        ({"model": "off"}, "passes"),
        ({"model": "counts"}, "is read"),  # whatever its size, the number of its messages may fire
        ({"models": [{"model": f"large-{number}"} for number in range(8)]}, "passes"),
        ({"models": [{"model": f"large-{number}"} for number in range(9)]}, "is read"),
    ],
)  # fmt: skip
async def test_every_model_that_a_body_names_must_have_room(
    entrance: Entrance, members: dict[str, Any], expected: str
) -> None:
    assert verdict(entrance, sized(**members)) == expected


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"max_tokens": 10}, "passes"),
        ({"max_tokens": 90_000}, "is read"),  # a quarter of the window is set aside
        ({"max_completion_tokens": 90_000, "max_tokens": 10}, "is read"),
        ({"max_completion_tokens": 10, "nested": {"max_tokens": 90_000}}, "is read"),
        ({"max_tokens": "90000"}, "passes"),
        ({"user": '"max_tokens": 90000'}, "passes"),
    ],
)
async def test_what_the_answer_may_take_is_set_aside(
    entrance: Entrance, members: dict[str, Any], expected: str
) -> None:
    await entrance.learning.get(TENANT, ORIGIN, "large")
    body = sized(model="large", **members).ljust(45_000)  # close to the soft mark of `large`
    assert verdict(entrance, body) == expected


async def test_the_first_request_that_limits_its_output_is_read(entrance: Entrance) -> None:
    body = sized(model="large", max_tokens=10)
    assert verdict(entrance, sized(model="large")) == "passes"
    assert verdict(entrance, body) == "is read"  # another process may know that the upstream adds them
    await entrance.learning.get(TENANT, ORIGIN, "large")
    assert verdict(entrance, body) == "passes"


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
async def test_a_body_with_media_is_read_however_small(entrance: Entrance, kind: str) -> None:
    part = {"type": kind, kind: {"url": "https://x.test/y"}}
    raw = json.dumps({"model": "large", "messages": [{"role": "user", "content": [part]}]}).encode()
    assert not entrance.passes(raw)
    assert entrance.passes(json.dumps({"model": "large", "messages": [json.dumps(part)]}).encode())


async def test_the_model_that_the_path_names_needs_room_too(entrance: Entrance) -> None:
    assert [entrance.passes(sized(), name) for name in ("large", "small")] == [True, False]
    assert not entrance.passes(sized(model="large"), "small")


async def test_a_name_is_known_by_what_it_says_not_by_how_it_is_written(entrance: Entrance) -> None:
    raws = [sized(model="large").replace(b"large", name) for name in (b"l\\u0061rge", b"sm\\u0061ll")]
    assert [entrance.passes(raw) for raw in raws] == [True, False]


async def test_a_learned_window_closes_the_gate_to_its_tenant(entrance: Entrance) -> None:
    await entrance.learning.learn_window(TENANT, ORIGIN, "large", 2_000)
    await entrance.learning.learn_window("another", ORIGIN, "large-1", 2_000)
    assert [entrance.passes(sized(model=name)) for name in ("large", "large-1")] == [False, True]


async def test_a_learned_ratio_counts(entrance: Entrance) -> None:
    await entrance.learning.learn_token_count(TENANT, ORIGIN, "large", 1_000, 3_900)
    assert [entrance.passes(sized(model=name)) for name in ("large", "large-1")] == [False, True]


async def test_a_compacted_conversation_passes_no_more(entrance: Entrance) -> None:
    raw = sized(model="large")
    await entrance.gate.remember_compacted(TENANT, "c_1", len(raw))
    await entrance.gate.remember_compacted("another", "c_2", len(raw))
    names = [None, "c_1", "c_2"]
    assert [entrance.passes(raw, None, name) for name in names] == [True, False, True]


async def test_where_one_without_an_id_was_compacted_those_with_a_history_pass_no_more(
    entrance: Entrance,
) -> None:
    raw = sized(model="large")
    await entrance.gate.remember_compacted(TENANT, None, len(raw))
    assert entrance.passes(raw)  # it begins, so nothing of it has been replaced
    assert not entrance.passes(raw.replace(b'"user"', b'"assistant"'))
    assert entrance.passes(raw.replace(b'"user"', b'"assistant"'), None, "c_1")


async def test_a_conversation_that_is_to_be_compacted_is_read_until_it_was(entrance: Entrance) -> None:
    raw = sized(model="large")
    await entrance.wishing.update(TENANT, "c_1", mark)
    await entrance.wishing.update("another", "c_2", mark)
    await entrance.wishing.add_pin(TENANT, "c_3", "keep this")
    names = [None, "c_1", "c_2", "c_3"]
    assert [entrance.passes(raw, None, name) for name in names] == [True, False, True, True]
    await entrance.wishing.clear_compaction_request(TENANT, "c_1")
    assert entrance.passes(raw, None, "c_1")


async def test_the_limits_are_the_largest_size_that_passes_and_the_trigger() -> None:
    entrance = Entrance()
    limits = entrance.gate.get_limits(TENANT, "gpt-4o-mini")
    assert limits.trigger_tokens == 88_500
    assert 60_000 < limits.max_bytes < 0.83 * 88_500  # the soft mark, not the trigger
    body = json.dumps({"model": "gpt-4o-mini", "messages": []})
    filler = " " * (int(limits.max_bytes) - len(body))
    assert entrance.passes((body + filler).encode())
    assert not entrance.passes((body + filler + "  ").encode())


@pytest.mark.parametrize(
    ("sections", "limits"),
    [
        ({"compaction": {"trigger": [{"tokens": 0}]}}, (MAX_BYTES, None)),
        ({"recall": {"tool": "always"}}, (-1.0, None)),
    ],
)
async def test_where_nothing_or_everything_is_read_the_limits_say_so(
    sections: dict[str, Any], limits: tuple[float, int | None]
) -> None:
    assert Entrance(**sections).gate.get_limits(TENANT, "m") == limits
