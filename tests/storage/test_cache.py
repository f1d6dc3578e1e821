from compaction_proxy.support.lru import ENTRY_BYTES, ExpiringLruCache

# For three records of ten bytes under keys of one.
ROOM = 3 * (2 * 10 + 1 + ENTRY_BYTES)


class Clock:
    time = 100.0

    def __call__(self) -> float:
        return self.time


def held(cache: ExpiringLruCache) -> list[str]:
    return [key for key in "abcdef" if cache.get(key) is not None]


def test_the_least_recently_used_leaves_first() -> None:
    cache = ExpiringLruCache(ROOM, Clock())
    for key in "abc":
        cache.put(key, {"k": key}, 10, 60)
    cache.get("a")
    cache.put("d", {"k": "d"}, 10, 60)

    assert held(cache) == ["a", "c", "d"]


def test_a_large_record_takes_the_room_of_several() -> None:
    cache = ExpiringLruCache(ROOM, Clock())
    for key in "abc":
        cache.put(key, {}, 10, 60)
    cache.put("d", {}, 600, 60)

    assert held(cache) == ["d"]


def test_what_is_too_large_is_not_held_and_its_older_form_is_gone() -> None:
    cache = ExpiringLruCache(ROOM, Clock())
    cache.put("a", {"n": 1}, 10, 60)
    cache.put("b", {}, 10, 60)
    cache.put("a", {"n": 2}, 1_000, 60)

    assert held(cache) == ["b"]


def test_overwriting_counts_once() -> None:
    cache = ExpiringLruCache(ROOM, Clock())
    for n in range(10):
        cache.put("a", {"n": n}, 10, 60)
        cache.put("b", {}, 20, 60)

    assert (cache.get("a"), held(cache)) == ({"n": 9}, ["a", "b"])


def test_records_whose_time_is_over_take_no_room_though_nobody_asks_for_them() -> None:
    clock = Clock()
    cache = ExpiringLruCache(ROOM, clock)
    cache.put("a", {}, 10, 10)
    cache.put("b", {}, 10, 10)
    clock.time += 10
    cache.put("c", {}, 10, 60)
    clock.time -= 10

    assert held(cache) == ["c"]


def test_a_record_leaves_when_its_time_is_over() -> None:
    clock = Clock()
    cache = ExpiringLruCache(ROOM, clock)
    cache.put("a", {}, 10, 60)
    clock.time += 60

    assert cache.get("a") is None
