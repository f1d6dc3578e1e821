"""Repairs a message list that the proxy rewrites, so that providers accept it.

A list that the proxy forwards unchanged is never repaired.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from compaction_proxy.core.message import Message, iter_tool_exchanges

NO_RESPONSE_TEXT = "Tool no response"
ACKNOWLEDGEMENT_TEXT = "Understood."
CONTINUE_TEXT = "Please go on."


def _complete_exchange(exchange: Sequence[Message]) -> Iterator[Message]:
    """Yields the calling message, then one result for each of its calls.

    A call without a result gets the result `NO_RESPONSE_TEXT`. Ids may be reused within a conversation, so
    only results that directly follow the calling message belong to its calls. A second result of the same
    call is dropped, and so is a result that matches none of the calls.
    """
    caller, *answers = exchange
    yield caller
    unanswered = Counter(call.id for call in caller.calls)
    for answer in answers:
        matched = _find_answered_calls(answer, unanswered)
        unanswered.subtract(matched)
        if matched:
            yield answer
    open_calls = [call.id for call in reversed(caller.calls) if _take(unanswered, call.id)]
    legacy = len(caller.calls) == 1 and not caller.calls[0].id
    for each in reversed(open_calls):
        role = "function" if legacy else "tool"
        yield Message(
            role=role,
            text=NO_RESPONSE_TEXT,
            name=caller.calls[0].name if legacy else "",
            answered_call_ids=(each,),
        )


def _find_answered_calls(answer: Message, unanswered: Mapping[str, int]) -> set[str]:
    """Returns the ids of those calls that a result answers and no earlier result has answered."""
    return {each for each in answer.answered_call_ids if unanswered.get(each)}


def _take(counts: Counter[str], key: str) -> bool:
    """Lowers the count of a key, and returns True, if it is not 0."""
    if not counts[key]:
        return False
    counts[key] -= 1
    return True


def is_valid_message_list(messages: Sequence[Message]) -> bool:
    """Returns whether `repair_messages` would leave the list unchanged."""
    unanswered: Counter[str] = Counter()
    unanswered_count = 0
    calling = False  # whether a result is allowed at this place
    for message in messages:
        if message.answered_call_ids:
            matched = _find_answered_calls(message, unanswered) if calling else set[str]()
            if not matched:
                return False
            unanswered.subtract(matched)
            unanswered_count -= len(matched)
            continue
        if unanswered_count or (message.role == "assistant" and message.is_empty):
            return False
        calling = bool(message.calls)
        if calling:
            unanswered = Counter(call.id for call in message.calls)
            unanswered_count = len(message.calls)
    return not unanswered_count


def repair_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the list with a result for each call, without stray results and empty assistant messages.

    Fixed messages between a call and its results move before the call.
    """
    repaired: list[Message] = []
    ordered = _move_fixed_before_calls(messages)
    for exchange in iter_tool_exchanges(ordered):
        run = ordered[exchange.start : exchange.stop]
        if run[0].calls:
            repaired.extend(_complete_exchange(run))
        elif run[0].answered_call_ids or (run[0].role == "assistant" and run[0].is_empty):
            continue
        else:
            repaired.append(run[0])
    return tuple(repaired)


def _move_fixed_before_calls(messages: Sequence[Message]) -> list[Message]:
    """Returns the list with fixed messages between a call and its results moved before the call."""
    ordered: list[Message] = []
    unit: list[Message] = []  # a message with calls, and its results so far
    gap: list[Message] = []  # fixed messages after the unit
    for message in messages:
        if unit and message.is_fixed:
            gap.append(message)
        elif unit and message.answered_call_ids:
            ordered += gap
            gap = []
            unit.append(message)
        else:
            ordered += unit + gap
            unit, gap = ([message], []) if message.calls else ([], [])
            ordered += [] if unit else [message]
    return ordered + unit + gap


def insert_alternating_fillers(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the list in a form in which user and assistant messages alternate, beginning with the user.

    Some upstreams demand this order. A short assistant message is added between two user messages, and a
    short user message between two assistant messages. A tool result counts as a user message, but nothing is
    added before it. Privileged messages stay in place. Parts of one client message stay together.
    """
    alternating: list[Message] = []
    last = "assistant"
    for message in messages:
        if alternating and message.source is not None and alternating[-1].source is message.source:
            alternating.append(message)
            continue
        if message.role in {"user", "assistant"}:
            if message.role == last:
                filler = ("assistant", ACKNOWLEDGEMENT_TEXT) if last == "user" else ("user", CONTINUE_TEXT)
                alternating.append(Message(role=filler[0], text=filler[1]))
            last = message.role
        elif message.answered_call_ids:
            last = "user"
        alternating.append(message)
    return tuple(alternating)
