"""Text of conversations stays text: nothing of it becomes an element or an attribute, on any page."""

import pytest

from tests.helpers.dashboard import NAME, PLACE, FakeAdmin, Read, pages, sample

ONE = f"/ui/conversations/{NAME}"
PAGES = (
    "/ui", "/ui/conversations", ONE, f"{ONE}/transcript", f"{ONE}/compactions/{PLACE}",
    f"{ONE}/compactions/{PLACE}/prompts", f"{ONE}/messages/m_2", f"{ONE}/search?q=x", "/ui/failures",
    "/ui/settings", "/ui/playground",
)  # fmt: skip
LEADING = ("href", "src", "action")
CORPUS = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onfocus=alert(1) autofocus x='",
    "javascript:alert(1)",
    "{{ 7*7 }}{% include 'page.html' %}${7*7}",
    "<svg/onload=alert(1)>",
    "</textarea></title></option><b data-into='#main' data-live='1' data-chart='{}'>",
    "]]><!--",
    "&lt;script&gt;&#60;img&#62;&quot;",
    "<mark>not ours</mark>",
)
MISLEADING = "a\u202eb\x00c\x1b[31md\u200be\u2066f\ud800g\x85h\u2028i"
SHOWN = "a⟨U+202E⟩b⟨U+0000⟩c⟨U+001B⟩[31md⟨U+200B⟩e⟨U+2066⟩f⟨U+D800⟩g⟨U+0085⟩h⟨U+2028⟩i"


def shape(page: Read) -> list[tuple[str, tuple[str, ...]]]:
    """Elements and the names of their attributes, in order; marks aside, which follow from the words."""
    return [(tag, tuple(attributes)) for tag, attributes in page.elements if tag != "mark"]


async def rendered(admin: FakeAdmin) -> dict[str, str]:
    """Every page, and the playground's answer."""
    async with pages(admin) as client:
        found = {path: (await client.get(path)).text for path in PAGES}
        found["tried"] = (await client.post("/ui/playground", data={"conversation": NAME})).text
        return found


async def test_hostile_text_changes_no_element_and_no_attribute_of_any_page() -> None:
    plain = await rendered(FakeAdmin(sample(lambda text: f"q{text}")))
    for hostile in (*CORPUS[:2], "".join(CORPUS)):
        found = await rendered(FakeAdmin(sample(lambda text, added=hostile: f"{added}{text}")))  # type: ignore[misc]
        for path, page in found.items():
            read = Read(page)
            assert shape(read) == shape(Read(plain[path])), (path, hostile)
            for _, attributes in read.elements:
                led = [str(attributes[name]) for name in LEADING if name in attributes]
                assert all(each.startswith(("/ui", "#main")) for each in led), (path, hostile)


@pytest.mark.parametrize("hostile", [CORPUS[0], CORPUS[1], CORPUS[4]])
async def test_hostile_text_is_shown_as_it_is(hostile: str) -> None:
    found = await rendered(FakeAdmin(sample(lambda text: f"{hostile} {text}")))
    for path in set(PAGES) - {"/ui/playground"}:
        assert " ".join(hostile.split()) in Read(found[path]).text, path


async def test_characters_that_hide_or_turn_others_around_are_shown_by_their_numbers() -> None:
    found = await rendered(FakeAdmin(sample(lambda text: f"{MISLEADING}{text}")))
    for path in set(PAGES) - {"/ui/playground"}:
        assert SHOWN in Read(found[path]).text, path
        assert not set("\u202e\x00\x1b\u200b\u2066\x85\u2028") & set(found[path]), path


async def test_a_hostile_id_in_the_path_is_quoted_wherever_it_is_named() -> None:
    async with pages(FakeAdmin({"search_archive": []})) as client:
        answer = await client.get('/ui/conversations/..%2F..%2Fx%22%3E%3Cimg%3E/search?q="><img onerror=x>')
    assert answer.status_code in (200, 404)
    assert [each for each in Read(answer.text).all("img") if each.get("src") is None] == []
