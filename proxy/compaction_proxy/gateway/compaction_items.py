"""Compaction items of ours: seals what they hold, and puts it back where a client sends one."""

import base64
import binascii
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from starlette.types import Scope

from compaction_proxy.compaction.replacements import LEDGER_OPENING
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import RequestRefused
from compaction_proxy.core.ledger.ledger import read_rendered
from compaction_proxy.core.message import Message
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.headers import first_values
from compaction_proxy.gateway.identity import Identities
from compaction_proxy.support.offload import beside
from compaction_proxy.wires.incremental_reader import LITTLE_BYTES
from compaction_proxy.wires.json.slices import elements
from compaction_proxy.wires.responses.compaction_item import TOKEN_PREFIX, expand_items, has_token
from compaction_proxy.wires.responses.items import read_kind
from compaction_proxy.wires.responses.messages import compose, message

# How the stand-ins of all strategies begin, up to the number of the round.
_OPENINGS = tuple(
    {opening for each in STRATEGIES.values() if (opening := each.frame.opening.partition("{round}")[0])}
)
# Bullets, and ids of messages that nobody has kept: quoted once more with each round, they would pile up.
_MARKS = re.compile(r"^(?:- )+| [\[(]m_[0-9a-f]+[\])]", re.MULTILINE)


class ItemCipher(Protocol):
    """Authenticated encryption, bound to a tenant (`gateway.compaction_cipher`)."""

    def encrypt_item(self, secret: bytes, tenant: str, plain: bytes) -> bytes:
        """Returns the sealed bytes."""
        ...

    def decrypt_item(self, secret: bytes, tenant: str, sealed: bytes) -> bytes | None:
        """Returns the plain bytes, or None if they do not open."""
        ...


class CompactionItems:
    """Seals and opens compaction items.

    An item is bound to the client's credential (`session.tenant`) and not to the upstream. So a
    conversation goes on where `upstream.base_url` changes.

    Args:
        config: The configuration.
        secrets: Returns the installation's secrets; the first seals, any of them opens.
        cipher: Returns what seals; called at the first item, because its library takes 8 MB.
    """

    def __init__(
        self, config: Config, secrets: Callable[[], tuple[bytes, ...]], cipher: Callable[[], ItemCipher]
    ) -> None:
        session = config.session
        known = bool(config.server.client_keys)
        self._identities = Identities("", session.tenant, session.headers, known=known)
        self._secrets = secrets
        self._cipher = cipher

    def seal(self, items: bytes, scope: Scope) -> str:
        """Returns the token of a JSON array of items, for the client of a request (ASGI)."""
        secret = self._secrets()[0]
        sealed = self._cipher().encrypt_item(secret, self._read_tenant(scope, secret), items)
        return TOKEN_PREFIX + base64.urlsafe_b64encode(sealed).decode()

    async def expand(self, raw: bytes, scope: Scope, *, restored: bool = False) -> bytes:
        """Returns a body with what its compaction items of ours stand for; without one, the same bytes.

        What comes back is never longer than what came, unless it is restored.

        Args:
            raw: The body.
            scope: The request's head (ASGI).
            restored: Whether the body is to be compacted again: then the words of the user that a ledger
                quotes are messages of the user, and all else that the proxy wrote is the assistant's. So no
                summary and no tool result is taken for what the user said.

        Raises:
            RequestRefused: 400 `invalid_encrypted_content`; an item of ours is altered, or another tenant's.
        """
        if not has_token(raw):
            return raw
        opened = partial(self._open_restored if restored else self._open, scope)
        work = partial(expand_items, raw, opened, with_latest=restored)
        return work() if len(raw) <= LITTLE_BYTES else await beside(work)

    def _open(self, scope: Scope, token: str) -> bytes:
        try:
            sealed = base64.b64decode(token.removeprefix(TOKEN_PREFIX), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            sealed = b""
        for secret in self._secrets():
            plain = self._cipher().decrypt_item(secret, self._read_tenant(scope, secret), sealed)
            if plain is not None:
                return plain
        message = "The encrypted content of a compaction item could not be verified."
        raise RequestRefused(400, message, "invalid_encrypted_content")

    def _open_restored(self, scope: Scope, token: str) -> bytes:
        items = elements(memoryview(self._open(scope, token)))
        return b"[%b]" % b",".join(piece for each in items for piece in _restore_item(each))

    def _read_tenant(self, scope: Scope, secret: bytes) -> str:
        headers = scope["headers"]
        return self._identities.of(headers, first_values(headers), secret).tenant


def _restore_item(item: bytes) -> Iterator[bytes]:
    """An item of a token as it is compacted again."""
    kind, role = read_kind(item)
    text = message(item).text if kind in {"", "message"} and role == "user" else ""
    if text.startswith(LEDGER_OPENING):
        said, observed = read_rendered(text)
        yield from (compose(Message("user", each)) for each in said)
        if observed:
            yield compose(Message("assistant", observed))
    elif text.startswith(_OPENINGS):
        yield compose(Message("assistant", _MARKS.sub("", text)))
    else:
        yield item
