"""Puts what a test has a summary model say into the form that the call asks for."""

from collections.abc import Sequence

from compaction_proxy.core.strategies import CHAINED, FULL, Policy

# A shorter text is no summary, and stays what it is.
LEAST_CHARACTERS = 40


def put_in_sections(text: str, policy: Policy) -> str:
    """Returns the text under the first section of a strategy, with nothing in the others."""
    headings = _headings(policy)
    return "\n\n".join([f"{headings[0]}\n{text}", *(f"{each}\nNone" for each in headings[1:])])


def put_as_asked(text: str, *asked: str) -> str:
    """Returns the text in the sections that a summary call asks for, if it asks for any.

    Args:
        text: What the model is to say. One that is no summary, or has sections already, is left as it is.
        asked: The instructions and whatever else the call holds.
    """
    for policy in (CHAINED, FULL):
        first = _headings(policy)[0]
        if any(first in each for each in asked) and first not in text and len(text) >= LEAST_CHARACTERS:
            return put_in_sections(text, policy)
    return text


def _headings(policy: Policy) -> Sequence[str]:
    assert policy.summary is not None
    return [each.heading for each in policy.summary.sections if not each.is_optional]
