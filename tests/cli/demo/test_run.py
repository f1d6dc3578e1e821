import re


def test_everything_that_the_demo_promises_holds(demo_text: str) -> None:
    checks = demo_text.splitlines()[-5:]
    assert [line[:4] for line in checks] == ["ok  "] * 5, "\n".join(checks)


def test_the_table_has_a_row_for_each_turn_and_none_is_larger_than_what_came(demo_text: str) -> None:
    rows = re.findall(r"^ +(\d+) +([\d,]+) +([\d,]+) +\d+%", demo_text, re.MULTILINE)
    numbers = [tuple(int(figure.replace(",", "")) for figure in row) for row in rows]
    assert [turn for turn, _, _ in numbers] == list(range(1, 42))
    assert all(sent <= came for _, came, sent in numbers)


def test_the_provider_reads_less_than_half_of_what_the_client_sends(demo_text: str) -> None:
    [(sent, read)] = re.findall(r"client sent ([\d,]+) tokens and the provider read ([\d,]+)", demo_text)
    assert int(read.replace(",", "")) < int(sent.replace(",", "")) / 2


def test_a_round_is_prepared_before_it_is_needed(demo_text: str) -> None:
    assert "next compaction prepared after the answer" in demo_text


def test_the_output_tells_no_port_and_no_time(demo_text: str) -> None:
    assert not re.search(r"127\.0\.0\.1|localhost|\d\d:\d\d", demo_text)
