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
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.core.ledger.ledger import parse_ledger
from compaction_proxy.core.message import Message
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.headers import build_header_map
from compaction_proxy.gateway.identity import IdentityCache
from compaction_proxy.support.offload import run_in_worker
from compaction_proxy.wires.incremental_reader import LITTLE_BYTES
from compaction_proxy.wires.json.slices import split_elements
from compaction_proxy.wires.responses.compaction_item import TOKEN_PREFIX, expand_items, has_token
from compaction_proxy.wires.responses.items import read_kind
from compaction_proxy.wires.responses.messages import encode_message, parse_message

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

    def decrypt_item(self, secret: bytes, tenant: str, ciphertext: bytes) -> bytes | None:
        """Returns the plain bytes, or None if they do not open."""
        ...


class CompactionItemCodec:
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
        self._identities = IdentityCache("", session.tenant, session.headers, has_client_keys=known)
        self._secrets = secrets
        self._cipher = cipher

    def encode_token(self, items: bytes, scope: Scope) -> str:
        """Returns the token of a JSON array of items, for the client of a request (ASGI)."""
        secret = self._secrets()[0]
        sealed = self._cipher().encrypt_item(secret, self._derive_tenant(scope, secret), items)
        return TOKEN_PREFIX + base64.urlsafe_b64encode(sealed).decode()

    async def expand_body(self, raw: bytes, scope: Scope, *, for_compaction: bool = False) -> bytes:
        """Returns a body with what its compaction items of ours stand for; without one, the same bytes.

        What comes back is never longer than what came, unless it is restored.

        Args:
            raw: The body.
            scope: The request's head (ASGI).
            for_compaction: Whether the body is to be compacted again: then the words of the user that a
                ledger quotes are messages of the user, and all else that the proxy wrote is the assistant's.
                So no summary and no tool result is taken for what the user said.

        Raises:
            RequestRefused: 400 `invalid_encrypted_content`; an item of ours is altered, or another tenant's.
        """
        if not has_token(raw):
            return raw
        opened = partial(self._decode_for_compaction if for_compaction else self._decode_token, scope)
        work = partial(expand_items, raw, opened, with_latest=for_compaction)
        return work() if len(raw) <= LITTLE_BYTES else await run_in_worker(work)

    def _decode_token(self, scope: Scope, token: str) -> bytes:
        try:
            sealed = base64.b64decode(token.removeprefix(TOKEN_PREFIX), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            sealed = b""
        for secret in self._secrets():
            plain = self._cipher().decrypt_item(secret, self._derive_tenant(scope, secret), sealed)
            if plain is not None:
                return plain
        message = "The encrypted content of a compaction item could not be verified."
        raise RequestRefusedError(400, message, "invalid_encrypted_content")

    def _decode_for_compaction(self, scope: Scope, token: str) -> bytes:
        items = split_elements(memoryview(self._decode_token(scope, token)))
        return b"[%b]" % b",".join(piece for each in items for piece in _restore_item(each))

    def _derive_tenant(self, scope: Scope, secret: bytes) -> str:
        headers = scope["headers"]
        return self._identities.identify_client(headers, build_header_map(headers), secret).tenant


def _restore_item(item: bytes) -> Iterator[bytes]:
    """An item of a token as it is compacted again."""
    kind, role = read_kind(item)
    text = parse_message(item).text if kind in {"", "message"} and role == "user" else ""
    if text.startswith(LEDGER_OPENING):
        said, observed = parse_ledger(text)
        yield from (encode_message(Message("user", each)) for each in said)
        if observed:
            yield encode_message(Message("assistant", observed))
    elif text.startswith(_OPENINGS):
        yield encode_message(Message("assistant", _MARKS.sub("", text)))
    else:
        yield item
