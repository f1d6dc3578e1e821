"""What a summary says of requests is corrected by how far they have come."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.ledger.frontier import StatementStatus
from compaction_proxy.core.summary.verify import correct_states

FLIGHT = "Change the return flight to May 27."
BAG = "Add a checked bag to the reservation."
NUMBER = "My customer number is C-40771."
STATES = {
    (0, FLIGHT): StatementStatus.ANSWERED,
    (1, BAG): StatementStatus.OPEN,
    (2, "Translate the menu."): StatementStatus.UNKNOWN,
    (3, NUMBER): StatementStatus.TOLD,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "| Change return flight to May 27 | changed | open |",
            "| Change return flight to May 27 | changed | done |",
        ),
        (
            "| checked bag for the reservation | x | done |",
            "| checked bag for the reservation | x | open then |",
        ),
        (
            "| checked bag for the reservation | x | open |",
            "| checked bag for the reservation | x | open then |",
        ),
        ("| Translate the menu | x | open |", "| Translate the menu | x | unknown |"),
        ("| Translate the menu | x | done |", "| Translate the menu | x | done |"),
        (
            "| My customer number is C-40771 | x | open |",
            "| My customer number is C-40771 | x | told by the user |",
        ),
        ("| 1 | pending | Change return flight to May 27 |", "| 1 | done | Change return flight to May 27 |"),
        ("| Find who C-40771 belongs to | x | open |", "| Find who C-40771 belongs to | x | open |"),
        ("## Open\n- My customer number is C-40771.\n- x", "## Open\n- x"),
        ("- [ ] change the return flight to May 27\n- [ ] y", "- [ ] y"),
        ("- [x] add a checked bag to the reservation\n- y", "- y"),
        ("- change the return flight to May 27 → open\n- y", "- y"),
        ("All is well. The return flight change to May 27 is still pending. Bye.", "All is well. Bye."),
        ("## Open\nThe return flight changes to May 27. More comes.", "## Open\nMore comes."),
        (
            "The return flight on May 27 changes at an open door.",
            "The return flight on May 27 changes at an open door.",
        ),
        ("| Request | Outcome | Status |", "| Request | Outcome | Status |"),
        ("## Open requests\n- Change the return flight to May 27", "## Open requests\nNone"),
        ("## Done\n- A checked bag was added to the reservation\n- Else", "## Done\n- Else"),
        ("**Pending:**\n- the return flight, May 27\n\n## Next\n- x", "**Pending:**\nNone\n\n## Next\n- x"),
        ("- open: change the return flight to May 27\n- other", "- other"),
        ("- [done] — nothing", "- [done] — nothing"),
        (
            "## Findings\n- the return flight of May 27 was full",
            "## Findings\n- the return flight of May 27 was full",
        ),
        ("## 已完成\n- Checked bag added to reservation", "## 已完成\nNone"),
    ],
)
def test_rows_and_entries_tell_the_state_that_a_request_has(text: str, expected: str) -> None:
    assert correct_states(text, STATES) == expected


def test_of_requests_that_a_line_holds_whole_that_of_the_most_words_counts() -> None:
    states = {
        (0, "Add a map command to the parser."): StatementStatus.ANSWERED,
        (1, "Add a map command to the parser that refreshes the index."): StatementStatus.OPEN,
    }
    row = "| Add a map command to the parser that refreshes the index | x | {} |"

    assert correct_states(row.format("open"), states) == row.format("open then")


def test_without_known_requests_nothing_changes() -> None:
    assert correct_states("## Open\n- x\n", {}) == "## Open\n- x\n"


@given(st.text(max_size=300))
def test_correcting_twice_changes_nothing_more(text: str) -> None:
    once = correct_states(text, STATES)

    assert correct_states(once, STATES) == once
    assert len(once) <= len(text) + (text.count("\n") + text.count("|") + 1) * 16
