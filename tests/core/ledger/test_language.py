"""The language of a user, told from what they write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.ledger.language import detect_language


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Can you debug this code?", "English"),
        ("Bau mir bitte eine Kartei-App", "German"),
        ("Corrige le bug dans src/a.py, s'il te plaît", "French"),
        ("Arregla el error en el archivo por favor", "Spanish"),
        ("Puoi correggere il file per favore? Non funziona", "Italian"),
        ("Você pode corrigir o arquivo? Não funciona", "Portuguese"),
        ("Kan je het bestand aanpassen? Het werkt niet", "Dutch"),
        ("Fixa filen, det fungerar inte som det ska", "Swedish"),
        ("Popraw plik, proszę, nie działa to jak powinno", "Polish"),
        ("Bu dosyayı düzelt lütfen, ne yazık ki çok yavaş ve kararsız", "Turkish"),  # noqa: RUF001 - its own letters
        ("请修复 src/main.py 里的错误", "Chinese"),
        ("src/main.py のバグを直してください", "Japanese"),
        ("파일의 오류를 고쳐 주세요", "Korean"),
        ("Исправь ошибку в файле main.py", "Russian"),
        ("Виправ помилку у файлі її", "Ukrainian"),  # noqa: RUF001 - its own letters
        ("أصلح الخطأ في الملف", "Arabic"),
        ("फ़ाइल में गलती ठीक करें", "Hindi"),
        ("Διόρθωσε το σφάλμα", "Greek"),
        ("תקן את השגיאה בקובץ", "Hebrew"),
        ("แก้ไขข้อผิดพลาดในไฟล์", "Thai"),
    ],
)
def test_a_sentence_tells_its_language(text: str, expected: str) -> None:
    assert detect_language([text]) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "x = 1",
        "npm run build && npm test",
        "1234 5678",
        "TypeError: foo.bar",
        "🙂",
        "src/der/die/das.py",
    ],
)
def test_what_is_no_prose_tells_nothing(text: str) -> None:
    assert detect_language([text]) == ""


def test_code_and_paths_around_it_do_not_hide_a_language() -> None:
    code = "```python\nfor the in is_not_that: the = of(the) and this or that\n```"

    assert (
        detect_language([f"Was ist mit diesem Code los?\n{code}\nEr geht nicht, siehe /usr/the/and/of.py"])
        == "German"
    )


def test_two_languages_in_equal_parts_tell_nothing() -> None:
    assert (
        detect_language(
            ["Das ist nicht gut und ich will es nicht", "This is not good and I do not want this"]
        )
        == ""
    )


def test_what_comes_first_decides_and_the_rest_of_a_long_conversation_is_not_read() -> None:
    read = 0

    def texts() -> object:
        nonlocal read
        while True:
            read += 1
            yield "Bitte sieh dir das noch einmal an, es ist nicht gut. " * 100

    assert detect_language(texts()) == "German"  # type: ignore[arg-type]
    assert read <= 11


@given(st.lists(st.text(max_size=60), max_size=5))
def test_any_text_gives_a_name_or_nothing(texts: list[str]) -> None:
    found = detect_language(texts)

    assert found == "" or found.isalpha()
    assert found == detect_language(texts)
