"""What users have said and still holds, of lists that grow and branch."""

from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.ledger.active import ActiveStatements, list_user_texts
from compaction_proxy.core.message import Message

SAID = st.sampled_from(
    [
        "The port is 8080.",
        "The port is now 9090. Please fix src/a.py.",
        "Actually, the port is 7070, and the host is db.internal.",
        "The host is api.internal, the port is 6060.",
        "Never touch prod.env.",
        "RULE: deploy on Monday.",
        "RULE: deploy on Friday.",
        "Please fix src/a.py. Please fix src/b.py.",
        "Thanks, that works.",
        "Is the port 5050?",
        "Also, the port of the metrics is 9100.",
        "Never touch prod.env. Never touch prod.env.",
        "",
    ]
)
MESSAGES = st.lists(
    st.one_of(
        st.builds(Message, st.just("user"), SAID),
        st.builds(Message, st.just("assistant"), SAID),
        st.builds(Message, st.just("user"), SAID, answered_call_ids=st.just(("call_1",))),
    ),
    max_size=24,
)


def told(standing: ActiveStatements, messages: list[Message]) -> tuple[object, ...]:
    """Everything that is asked of it."""
    return (
        standing.list_statements_in_messages(range(len(messages))),
        standing.superseded,
        standing.statement_count,
    )


@given(MESSAGES, MESSAGES, MESSAGES)
def test_a_list_that_is_carried_on_holds_what_it_holds_when_read_anew(
    first: list[Message], more: list[Message], branch: list[Message]
) -> None:
    before = ActiveStatements(first)
    for grown in (first + more, first + branch):
        assert told(ActiveStatements(grown, earlier=before), grown) == told(ActiveStatements(grown), grown)
    assert told(before, first) == told(ActiveStatements(first), first)


@given(MESSAGES, MESSAGES)
def test_only_what_users_said_first_can_be_carried_on(first: list[Message], other: list[Message]) -> None:
    ours, theirs = list_user_texts(first), list_user_texts(other)
    assert ActiveStatements(first).is_prefix_of(theirs) == bool(ours and theirs[: len(ours)] == ours)


def test_what_was_read_is_not_read_again() -> None:
    asked: list[str] = []

    def said(text: str) -> tuple[()]:
        asked.append(text)
        return ()

    first, second = Message("user", "The port is 8080."), Message("user", "The port is 9090.")
    before = ActiveStatements([first], said)
    ActiveStatements([first, Message("assistant", "Noted."), second], said, before)
    assert asked == [first.text, second.text]
