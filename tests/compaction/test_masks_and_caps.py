"""What `anchored` shortens where it stands: old results to a line, huge ones and a task to head and tail."""

import json

import pytest

from compaction_proxy.compaction.types import CompactionMode, CompactionStatus
from tests.helpers.compaction_bench import (
    SOFT,
    TARGET,
    TRIGGER,
    USABLE,
    JsonObject,
    bench,
    called,
    forwarded,
    loop,
    prefix,
    says,
    talk,
    undo,
    user,
)

# Lines of about 4 tokens: beyond a quarter of usable, and beyond all of it.
TOO_LARGE = 900
OVER_USABLE = 3_600


def results(step: int, *, lines: int = 100, path: str = "") -> list[JsonObject]:
    return called(step, f"{step}: " + "line of code; " * lines, path)


def chatter(messages: list[JsonObject]) -> list[JsonObject]:
    """The answers that followed the results, so that the tail is made of talk."""
    return [*messages, says("I see."), user("Go on with it, please.")]


async def test_masks_alone_make_a_round_where_they_bring_the_request_to_its_target() -> None:
    messages = loop(24, lines=95)
    async with bench() as made:
        fit = await made.fit(messages)
        again = await made.fit([*messages, *results(24, lines=10)])
    assert (fit.report.tokens_before or 0) >= TRIGGER
    assert (fit.report.status, fit.report.round, made.summaries.calls) == (CompactionStatus.APPLIED, None, [])
    assert (fit.report.tokens_after or 0) <= TARGET + 100
    kept = forwarded(fit)
    assert len(kept) == len(messages)
    masked = [
        each["content"] for each in kept if each["role"] == "tool" and "left out, m_" in each["content"]
    ]
    assert masked[0].startswith("[read src/0.py: 1 lines, ")
    assert kept[-1] == messages[-1]
    assert again.raw.startswith(prefix(fit))


async def test_what_is_read_again_later_is_masked_first() -> None:
    messages = loop(1, lines=100)
    for step in range(1, 8):
        messages += results(step, lines=300, path="src/same.py")
    async with bench() as made:
        fit = await made.fit(messages)
    masked = [k for k, each in enumerate(forwarded(fit)) if "left out, m_" in str(each["content"])]
    assert fit.report.round is None
    assert {4, 6, 8, 10} <= set(masked)
    assert 2 not in masked
    assert masked[:2] != [2, 4]


async def test_where_masks_do_not_suffice_a_record_is_written() -> None:
    async with bench() as made:
        fit = await made.fit(talk(100))
    assert (fit.report.round, len(made.summaries.calls)) == (1, 1)


async def test_masks_are_not_made_ahead_of_need() -> None:
    messages = loop(20, lines=95)
    async with bench() as made:
        fit = await made.answered(messages)
        await made.settled()
        again = await made.fit(messages)
    assert SOFT <= (fit.report.tokens_after or 0) < TRIGGER
    assert (again.raw, again.report.status, made.summaries.calls) == (fit.raw, CompactionStatus.SCHEDULED, [])


async def test_a_new_result_is_whole_as_long_as_a_round_can_make_room_for_it() -> None:
    last = results(2, lines=TOO_LARGE)
    async with bench() as made:
        small = await made.fit([*loop(2), *last])
        large = await made.fit([*talk(90)[1:], *last], conversation="c_2")
    assert (small.report.tokens_before or 0) > 0.25 * USABLE
    assert small.report.status is CompactionStatus.NONE
    assert (large.report.tokens_before or 0) > TRIGGER
    assert large.report.status is CompactionStatus.APPLIED
    assert forwarded(large)[-1] == last[-1]


async def test_a_result_that_no_round_makes_room_for_is_capped_and_stays_as_it_was_cut() -> None:
    messages = [*loop(2), *results(2, lines=OVER_USABLE)]
    async with bench() as made:
        fit = await made.fit(messages)
        cut = forwarded(fit)[-1]["content"]
        grown = await made.fit([*messages, *results(3)])
        later = await made.fit([*messages, *results(3), says("It is found."), user("Thanks. Mend it.")])
    assert (fit.report.tokens_before or 0) > USABLE
    assert (fit.report.tokens_after or 0) < 0.4 * TRIGGER
    assert "characters of m_" in cut
    assert messages[-1]["content"].startswith(cut[:500])
    assert messages[-1]["content"].endswith(cut[-500:])
    assert grown.raw.startswith(prefix(fit))
    assert later.raw.startswith(prefix(grown))
    assert made.summaries.calls == []


async def test_a_cap_survives_a_round_that_leaves_it_in_the_tail() -> None:
    messages = [*talk(60)[1:], *results(0, lines=OVER_USABLE)]
    async with bench() as made:
        capped = await made.fit(messages)
        cut = forwarded(capped)[-1]
        forced = await made.fit(messages, mode=CompactionMode.FORCE)
        after = await made.fit([*messages, says("I see."), user("Go on.")])
    assert "characters of m_" in cut["content"]
    assert forced.report.status is CompactionStatus.APPLIED
    assert cut in forwarded(forced)
    assert after.raw.startswith(prefix(forced))


async def test_an_undone_cap_is_not_made_again_where_the_request_fits_without_it() -> None:
    messages = [*loop(2), *results(2, lines=OVER_USABLE)]
    async with bench() as made:
        fit = await made.fit(messages)
        await made.wishing.update("t", "c_1", undo(bytes.fromhex(fit.report.checkpoint_id)))
        undone = await made.fit(messages[:-1] + results(2, lines=TOO_LARGE)[-1:])
    assert fit.report.status is CompactionStatus.APPLIED
    assert undone.report.status is CompactionStatus.NONE


async def test_a_task_over_its_size_keeps_head_and_tail_and_a_later_user_message_is_whole() -> None:
    task = user("Do it. " + "Mind the margin of the page. " * 200 + "That is all.")
    messages = [task, *talk(90)[2:]]
    async with bench() as made:
        fit = await made.fit(messages)
    kept = forwarded(fit)
    assert fit.report.round == 1
    assert kept[0]["role"] == "user"
    assert kept[0]["content"].startswith("Do it. ")
    assert kept[0]["content"].endswith("That is all.")
    assert len(kept[0]["content"]) < len(task["content"]) / 1.4
    assert kept[-1] == messages[-1]


async def test_rules_in_the_cut_part_of_a_task_stay_word_for_word_round_after_round() -> None:
    rules = ["RULE: never touch the production database.", "RULE: use tabs in Makefiles."]
    page = "Mind the margin of the page. " * 100
    task = user(f"Do it. {page}\n\n" + "\n".join(rules) + f"\n\n{page} That is all.")
    messages = [task, *talk(90)[2:]]
    async with bench() as made:
        first = await made.fit(messages)
        later = await made.fit([*messages, *talk(90)])
    assert (first.report.round, later.report.round) == (1, 2)
    for fit in (first, later):
        assert not any(rule in forwarded(fit)[0]["content"] for rule in rules)
        assert all(rule in json.dumps(forwarded(fit)) for rule in rules)


async def test_images_do_not_shorten_the_text_of_a_task() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}
    task = {"role": "user", "content": [image] * 6 + [{"type": "text", "text": "Fix what you see."}]}
    async with bench() as made:
        fit = await made.fit([task, *talk(90)[2:]])
    assert fit.report.round == 1
    assert forwarded(fit)[0] == task


async def test_a_task_that_is_the_latest_user_message_is_never_shortened() -> None:
    task = user("Do it. " + "Mind the margin of the page. " * 300)
    messages = [task, *loop(30, lines=60)[1:]]
    async with bench() as made:
        fit = await made.fit(messages)
        forced = await made.fit(messages, mode=CompactionMode.FORCE)
    assert fit.report.status is CompactionStatus.APPLIED
    assert [forwarded(each)[0] for each in (fit, forced)] == [task, task]


@pytest.mark.parametrize("size", [10, 2_000, 6_000])
async def test_the_latest_user_message_is_untouched_however_large(size: int) -> None:
    last = user("Look. " + "word " * size)
    async with bench() as made:
        fit = await made.fit([*talk(60)[:-1], last])
    assert forwarded(fit)[-1] == last


def shown(url: str) -> JsonObject:
    parts = [{"type": "text", "text": "Look at this."}, {"type": "image_url", "image_url": {"url": url}}]
    return {"role": "user", "content": parts}


async def test_an_image_in_an_old_message_is_a_note_to_the_model_and_gone_from_the_request() -> None:
    messages = talk(100)
    messages[5] = shown("https://img.test/old.png")
    messages[-1] = shown("https://img.test/new.png")
    async with bench() as made:
        fit = await made.fit(messages)
        [call] = made.summaries.calls
    assert (b"old.png" in fit.raw, b"new.png" in fit.raw) == (False, True)
    assert forwarded(fit)[-1] == messages[-1]
    assert "old.png" not in call.prompt
    assert "image_url" in call.prompt


def parallel(step: int) -> list[JsonObject]:
    """Two calls at once, with the same ids in every step."""
    calls = [
        {
            "id": f"call_{k}",
            "type": "function",
            "function": {"name": "read", "arguments": f'{{"path":"{step}{k}"}}'},
        }
        for k in "ab"
    ]
    answers = [
        {"role": "tool", "tool_call_id": f"call_{k}", "content": f"{step}{k} " + "it works; " * 30}
        for k in "ab"
    ]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *answers]


def custom(step: int) -> list[JsonObject]:
    call = {"id": f"c{step}", "type": "custom", "custom": {"name": "sh", "input": f"ls {step}"}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{step}", "content": f"{step} " + "it works; " * 60},
    ]


def legacy(step: int) -> list[JsonObject]:
    call = {"name": "look", "arguments": f'{{"at":{step}}}'}
    return [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look", "content": f"{step} " + "it works; " * 60},
    ]


def signed(step: int) -> list[JsonObject]:
    [call, result] = called(step, f"{step} " + "it works; " * 60)
    thought = [{"type": "reasoning.encrypted", "data": f"SIGNED{step}"}]
    return [{**call, "reasoning_details": thought, "reasoning_content": f"thought {step}"}, result]


@pytest.mark.parametrize("kind", [parallel, custom, legacy, signed])
async def test_calls_of_every_kind_are_kept_whole_or_dropped_whole(kind: object) -> None:
    assert callable(kind)
    steps: list[list[JsonObject]] = [kind(step) for step in range(80)]
    messages = [user("Find it."), *(each for step in steps for each in step)]
    async with bench() as made:
        masked = forwarded(await made.fit(messages))
        forced = forwarded(await made.fit(messages, mode=CompactionMode.FORCE))
    for kept in (masked, forced):
        callers = [each for each in kept if "tool_calls" in each or "function_call" in each]
        made_calls = sum(len(each.get("tool_calls", ["legacy"])) for each in callers)
        assert made_calls == sum(each["role"] in {"tool", "function"} for each in kept)
        assert all(each in messages for each in callers)
        assert kept[-len(steps[-1]) :] == steps[-1]
    assert len(forced) < len(messages)


async def test_system_messages_in_the_middle_are_kept_in_their_order() -> None:
    messages = talk(100)
    for at, text in ((30, "Speak softly."), (90, "Speak up.")):
        messages.insert(at, {"role": "system", "content": text})
    messages.insert(-4, {"role": "developer", "content": "Late word."})
    async with bench() as made:
        kept = forwarded(await made.fit(messages))
    privileged = [each for each in kept if each["role"] in {"system", "developer"}]
    assert privileged == [each for each in messages if each["role"] in {"system", "developer"}]
    assert [each["role"] for each in kept[:3]] == ["system", "system", "system"]
    assert kept[-5:] == messages[-5:]


async def test_members_of_messages_that_we_do_not_know_stay_on_those_that_are_kept() -> None:
    messages = talk(100)
    messages[-2]["x_note"] = {"kept": [1, None]}
    async with bench() as made:
        fit = await made.fit(messages)
    assert forwarded(fit)[-2] == messages[-2]
    assert json.loads(fit.raw)["seed"] == 7
