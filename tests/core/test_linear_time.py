"""What reads the texts of others takes time that is linear in them, whatever they are made of."""

import contextlib
import time

import pytest

from compaction_proxy.core.errors import SummaryError
from compaction_proxy.core.ledger.actions import read_action
from compaction_proxy.core.ledger.facts import list_message_facts
from compaction_proxy.core.ledger.frontier import StatementStatus, read_frontier, read_reply
from compaction_proxy.core.ledger.language import detect_language
from compaction_proxy.core.ledger.statements import reads_as_order
from compaction_proxy.core.masking import format_mask
from compaction_proxy.core.message import Message, MessageToolCall
from compaction_proxy.core.sanitize import sanitize_text
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.core.summary.extractive import build_extractive_summary
from compaction_proxy.core.summary.prompt import build_transcript
from compaction_proxy.core.summary.verify import correct_states, verify_summary

CHARACTERS = 40_000
# In seconds a character; fifty times what is meant: a shared machine is slow at times.
MOST_S = 100e-6
PIECES = ("the ", "e", "a.", "x=1 ", " ", "\n", "\u5b57", '"', "@", "no ", "```\n", "<", "[", "A", "1", "/")


def checked(text: str) -> None:
    with contextlib.suppress(SummaryError):
        verify_summary(text, sources=[Message("user", text)], earlier_summaries=(), language="English")


def read_as_a_result(text: str) -> None:
    result, call = Message("tool", text, answered_call_ids=("1",)), MessageToolCall("1", "bash", text)
    shape = STRATEGIES["anchored"].summary
    assert shape is not None
    format_mask(result, call, "m_1")
    build_transcript([result], shape)
    list_message_facts(result)
    read_action(call, text)
    read_frontier(
        [Message("user", text), Message("assistant", calls=(call,)), result, Message("user", "Thanks.")]
    )


def compared_with_requests(text: str) -> None:
    states = {
        (number, f"Fix the {number} bugs of the parser."): StatementStatus.OPEN for number in range(200)
    }
    correct_states(text, states)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize(
    "reading",
    [
        reads_as_order,
        sanitize_text,
        checked,
        read_as_a_result,
        lambda text: build_extractive_summary([Message("assistant", text)], 4_000, str),
        lambda text: detect_language([text] * 10),
        read_reply,
        compared_with_requests,
    ],
    ids=["orders", "defanged", "verified", "result", "extractive", "language", "reply", "states"],
)
def test_no_text_takes_long_to_be_read(reading: object, piece: str) -> None:
    text = (piece * CHARACTERS)[:CHARACTERS]
    assert callable(reading)
    begun = time.process_time()
    reading(text)
    assert time.process_time() - begun < MOST_S * len(text)
