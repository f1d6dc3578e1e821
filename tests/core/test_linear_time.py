"""What reads the texts of others takes time that is linear in them, whatever they are made of."""

import contextlib
import time

import pytest

from proxy.core.actions import read_action
from proxy.core.defang import defanged
from proxy.core.extract import extractive
from proxy.core.facts import shown
from proxy.core.frontier import RequestState, read_frontier, read_reply
from proxy.core.language import language
from proxy.core.masks import masked_text
from proxy.core.message import Call, Message
from proxy.core.orders import orders
from proxy.core.policy import STRATEGIES
from proxy.core.request_states import correct_states
from proxy.core.transcript import transcript
from proxy.core.verifying import verified
from proxy.errors import SummaryFailed

CHARACTERS = 40_000
# In seconds a character; fifty times what is meant: a shared machine is slow at times.
MOST_S = 100e-6
PIECES = ("the ", "e", "a.", "x=1 ", " ", "\n", "\u5b57", '"', "@", "no ", "```\n", "<", "[", "A", "1", "/")


def checked(text: str) -> None:
    with contextlib.suppress(SummaryFailed):
        verified(text, sources=[Message("user", text)], earlier=(), language="English")


def read_as_a_result(text: str) -> None:
    result, call = Message("tool", text, answers=("1",)), Call("1", "bash", text)
    shape = STRATEGIES["anchored"].summary
    assert shape is not None
    masked_text(result, call, "m_1")
    transcript([result], shape)
    shown(result)
    read_action(call, text)
    read_frontier(
        [Message("user", text), Message("assistant", calls=(call,)), result, Message("user", "Thanks.")]
    )


def compared_with_requests(text: str) -> None:
    states = {(number, f"Fix the {number} bugs of the parser."): RequestState.OPEN for number in range(200)}
    correct_states(text, states)


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize(
    "reading",
    [
        orders,
        defanged,
        checked,
        read_as_a_result,
        lambda text: extractive([Message("assistant", text)], 4_000, str),
        lambda text: language([text] * 10),
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
