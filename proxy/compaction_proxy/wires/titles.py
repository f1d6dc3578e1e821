"""Finds a title for the conversation of a request: the beginning of its latest user message."""

import re
from contextlib import suppress

from compaction_proxy.core.errors import UnreadableBodyError
from compaction_proxy.core.message import find_latest_user_message
from compaction_proxy.wires.body import RequestBody

MAX_TITLE_CHARACTERS = 80
# Most messages that are searched, from the end. A request that continues after many tool results has no user
# message among them. The conversation then keeps the title that it has.
MAX_MESSAGES = 16
# A message with more bytes than this is not searched, because decoding it would take milliseconds.
MAX_MESSAGE_BYTES = 128 * 1024
# Most characters of a message that are searched.
MAX_SEARCHED_CHARACTERS = 600
# Text that a client puts into the user's message, such as `<system-reminder>…</system-reminder>`. The names
# of such tags have several words, so HTML that a user writes stays. A tag at the start may be closed by text
# that is not searched.
_CLIENT_TEXT = re.compile(r"<([a-z]+[_-][a-z_-]{1,40})>.*?</\1>", re.DOTALL)
_OPEN_CLIENT_TEXT = re.compile(r"\s*<[a-z]+[_-][a-z_-]{1,40}>")


def find_title(body: RequestBody) -> str:
    """Returns the beginning of the latest user message of a request, in one line.

    Returns an empty text if there is none among the last `MAX_MESSAGES` messages, or among those that the
    client has added since its last request. Skips messages of more than `MAX_MESSAGE_BYTES` bytes.
    """
    for raw in body.new_pieces[: -MAX_MESSAGES - 1 : -1]:
        if len(raw) > MAX_MESSAGE_BYTES:
            continue
        with suppress(UnreadableBodyError):
            message = body.wire.parse_message(raw)
            if find_latest_user_message((message,)) is None:
                continue
            text = _CLIENT_TEXT.sub(" ", message.text[:MAX_SEARCHED_CHARACTERS])
            title = " ".join(text.split())
            if title and not _OPEN_CLIENT_TEXT.match(title):
                is_long = len(title) > MAX_TITLE_CHARACTERS
                return f"{title[: MAX_TITLE_CHARACTERS - 1]}…" if is_long else title
    return ""
