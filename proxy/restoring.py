"""Checkpoints from their records: a stand-in is kept as its bytes, and read again as any message is."""

from dataclasses import replace

from proxy.core.checkpoint import Checkpoint, from_fields
from proxy.core.message import Message
from proxy.dialects.chat_message import message
from proxy.errors import Unreadable
from proxy.records import Fields


def restored(fields: Fields | None) -> Checkpoint | None:
    """The checkpoint that a record holds, or None if it holds none that we can read."""
    checkpoint = from_fields(fields) if fields else None
    if checkpoint is None:
        return None
    try:
        return replace(checkpoint, stand_ins=tuple(each and _read(each) for each in checkpoint.stand_ins))
    except Unreadable:
        return None


def _read(stand_in: Message) -> Message:
    return replace(message(stand_in.raw), tokens=stand_in.tokens)
