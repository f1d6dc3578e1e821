from compaction_proxy.support.lru import BoundedDict, LruCache


def held(cache: LruCache[str, int]) -> list[str]:
    return [key for key in "abcdef" if cache.get(key) is not None]


def test_the_least_recently_used_leaves_first() -> None:
    cache = LruCache[str, int](30)
    for key in "abc":
        cache.put(key, 1, 10)
    cache.get("a")
    cache.put("d", 1, 10)

    assert held(cache) == ["a", "c", "d"]


def test_a_large_value_takes_the_room_of_several() -> None:
    cache = LruCache[str, int](30)
    for key in "abc":
        cache.put(key, 1, 10)
    cache.put("d", 1, 25)

    assert held(cache) == ["d"]


def test_what_is_too_large_is_not_held_and_its_older_form_is_gone() -> None:
    cache = LruCache[str, int](30)
    cache.put("a", 1, 10)
    cache.put("b", 1, 10)
    cache.put("a", 2, 31)

    assert held(cache) == ["b"]


def test_overwriting_counts_once() -> None:
    cache = LruCache[str, int](30)
    for n in range(10):
        cache.put("a", n, 10)
        cache.put("b", n, 20)

    assert (cache.get("a"), held(cache)) == (9, ["a", "b"])


def test_a_full_dict_drops_what_was_written_longest_ago() -> None:
    bounded = BoundedDict[str, int](2)
    bounded["a"] = bounded["b"] = 1
    bounded["a"] = 2
    bounded.setdefault("c", 3)

    assert list(bounded.items()) == [("a", 2), ("c", 3)]
