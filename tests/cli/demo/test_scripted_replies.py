import json

from compaction_proxy.cli.demo.replies import load_script
from compaction_proxy.providers.tokenizers import TiktokenCounter

SCRIPT = load_script()


def test_the_conversation_is_long_and_outgrows_its_window() -> None:
    counter = TiktokenCounter(print)
    texts = [turn.user for turn in SCRIPT.turns]
    for turn in SCRIPT.turns:
        texts += [step.text for step in turn.steps]
        texts += [call.arguments for step in turn.steps for call in step.calls]
    texts += SCRIPT.results.values()
    assert len(SCRIPT.turns) >= 36
    assert 26_000 <= sum(counter.count(text, "demo-agent") for text in texts) <= 34_000


def test_every_turn_ends_in_text_and_calls_tools_that_are_offered() -> None:
    offered = {tool["function"]["name"] for tool in SCRIPT.tools}
    for turn in SCRIPT.turns:
        calls = [call for step in turn.steps for call in step.calls]
        assert turn.steps[-1].calls == ()
        assert len(calls) <= 2
        assert {call.name for call in calls} <= offered
        assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


def test_call_ids_and_user_messages_are_unique() -> None:
    calls = [call.id for turn in SCRIPT.turns for step in turn.steps for call in step.calls]
    assert len(set(calls)) == len(calls) == len(SCRIPT.results)
    assert len({turn.user for turn in SCRIPT.turns}) == len(SCRIPT.turns)


def test_facts_are_said_by_the_user_in_the_first_three_turns_and_by_nobody_later() -> None:
    early = " ".join(turn.user for turn in SCRIPT.turns[:3])
    later = [turn.user for turn in SCRIPT.turns[3:]]
    later += [step.text for turn in SCRIPT.turns for step in turn.steps]
    later += SCRIPT.results.values()
    for fact in SCRIPT.facts.values():
        assert fact in early
        assert not any(fact in text for text in later)


def test_the_last_turns_ask_for_every_fact() -> None:
    closing = " ".join(step.text for turn in SCRIPT.turns[-2:] for step in turn.steps)
    assert all("{" + name + "}" in closing for name in SCRIPT.facts)
