"""seeds/002 end to end: the strategy `prune` through the whole proxy."""

from tests.system.seeds.stage import JsonObject, Placed, loop, report, said, system, talk, user


async def test_it_fires_at_95_percent_of_the_window_and_not_below(placed: Placed) -> None:
    def asked(words: int) -> list[JsonObject]:
        return [system(), *talk(200, words), user("And now?")]

    async with placed("prune", window=32_000) as place:
        below, at = await place.sizes(asked, 30_400)
        assert report(await place.ask(asked(below), "below"), "status") == ["none"]
        assert report(await place.ask(asked(at), "at"), "status") == ["applied"]


async def test_the_task_and_the_last_50_stay_without_a_call_and_without_a_stand_in(placed: Placed) -> None:
    messages = [system(), user("Build it"), *(said(f"Part {k} is done.") for k in range(100))]
    async with placed("prune") as place:
        answer = await place.force(messages)
        assert place.provider.sent == [*messages[:2], *messages[-50:]]
        assert place.provider.summaries == []
        assert report(answer, "status", "round") == ["applied", "1"]


async def test_its_event_holds_what_went_and_no_summary(placed: Placed) -> None:
    async with placed("prune", compaction={"strategies": {"prune": {"keep_messages": 4}}}) as place:
        answer = await place.force([user("Build it"), *loop(6)])
        [event] = await place.events(answer)
        assert (event["strategy"], event["round"], event["messages"]) == ("prune", 1, 8)
        assert (event["summary"], event["model"], len(event["message_ids"])) == ("", "", 8)


async def test_the_next_round_takes_what_has_come_since(placed: Placed) -> None:
    async with placed("prune", compaction={"strategies": {"prune": {"keep_messages": 4}}}) as place:
        messages = [user("Build it"), *loop(6)]
        await place.force(messages)
        messages += loop(4, 20)
        answer = await place.force(messages)
        assert place.provider.sent == [messages[0], *messages[-4:]]
        assert report(answer, "round") == ["2"]
