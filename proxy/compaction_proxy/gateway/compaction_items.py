"""Encodes and decodes our compaction items, which hold the result of a compaction in encrypted form.

On the Responses wire, the proxy answers a request for a compaction with such an item. The client sends the
item back in later requests. There it is replaced with its decrypted content.
"""

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
from compaction_proxy.wires.incremental_reader import MAX_INLINE_BYTES
from compaction_proxy.wires.json.slices import split_elements
from compaction_proxy.wires.responses.compaction_item import TOKEN_PREFIX, expand_tokens, may_have_token
from compaction_proxy.wires.responses.messages import PARSER, encode_message, read_type_and_role

# The texts with which the replacements of all strategies begin, up to the round number in them. A user
# message that begins with one of these texts was written by the proxy.
_OPENINGS = tuple(
    {opening for each in STRATEGIES.values() if (opening := each.frame.opening.partition("{round}")[0])}
)
# Matches bullets and message ids. Both are removed from a replacement before it is compacted again. Otherwise
# each compaction would add new ones to the old ones. The ids are of no use, because the messages are not
# stored.
_MARKS = re.compile(r"^(?:- )+| [\[(]m_[0-9a-f]+[\])]", re.MULTILINE)


class ItemCipher(Protocol):
    """Encrypts and decrypts the content of items for one tenant at a time (`gateway.compaction_cipher`)."""

    def encrypt_item(self, secret: bytes, tenant: str, plain: bytes) -> bytes:
        """Returns the encrypted bytes of `plain`."""
        ...

    def decrypt_item(self, secret: bytes, tenant: str, ciphertext: bytes) -> bytes | None:
        """Returns the decrypted bytes, or None if the ciphertext cannot be decrypted."""
        ...


class CompactionItemCodec:
    """Encrypts and decrypts compaction items.

    Only the tenant for which an item was encrypted can use it. Unlike the tenant in store keys, this tenant
    depends only on the client's credential (`session.tenant`) and not on the upstream. So a conversation can
    go on after `upstream.base_url` has changed.

    Args:
        config: The configuration.
        get_secrets: Returns the installation's secrets. The first one is used to encrypt. To decrypt, each of
            them is tried.
        load_cipher: Returns the cipher. It is called only when there is an item, because the cipher's library
            takes 8 MB of memory.
    """

    def __init__(
        self,
        config: Config,
        get_secrets: Callable[[], tuple[bytes, ...]],
        load_cipher: Callable[[], ItemCipher],
    ) -> None:
        session = config.session
        has_client_keys = bool(config.server.client_keys)
        self._identities = IdentityCache("", session.tenant, session.headers, has_client_keys=has_client_keys)
        self._secrets = get_secrets
        self._cipher = load_cipher

    def encode_token(self, items: bytes, scope: Scope) -> str:
        """Returns a token that holds items in encrypted form.

        Args:
            items: The items, as a JSON array.
            scope: The ASGI scope of the request. Only the tenant of this request can use the token.
        """
        secret = self._secrets()[0]
        ciphertext = self._cipher().encrypt_item(secret, self._derive_tenant(scope, secret), items)
        return TOKEN_PREFIX + base64.urlsafe_b64encode(ciphertext).decode()

    async def decrypt_items_in_body(self, raw: bytes, scope: Scope, *, for_compaction: bool = False) -> bytes:
        """Replaces our compaction items in a body with their decrypted content.

        A body without such items is returned unchanged. Nothing else in the body changes.

        Args:
            raw: The request body.
            scope: The ASGI scope of the request.
            for_compaction: Whether the body will be compacted again. If so, the user's words that a ledger
                quotes become messages of the user, and all other text that the proxy wrote becomes messages
                of the assistant. So the next compaction does not mistake a summary or a tool result for the
                user's words.

        Raises:
            RequestRefusedError: 400 `invalid_encrypted_content`, one of the proxy's items is altered or
                belongs to another tenant.
        """
        if not may_have_token(raw):
            return raw
        open_token = partial(self._decode_for_compaction if for_compaction else self._decode_token, scope)
        work = partial(expand_tokens, raw, open_token, with_latest=for_compaction)
        return work() if len(raw) <= MAX_INLINE_BYTES else await run_in_worker(work)

    def _decode_token(self, scope: Scope, token: str) -> bytes:
        try:
            ciphertext = base64.b64decode(token.removeprefix(TOKEN_PREFIX), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            ciphertext = b""
        for secret in self._secrets():
            plain = self._cipher().decrypt_item(secret, self._derive_tenant(scope, secret), ciphertext)
            if plain is not None:
                return plain
        message = "The encrypted content of a compaction item could not be verified."
        raise RequestRefusedError(400, message, "invalid_encrypted_content")

    def _decode_for_compaction(self, scope: Scope, token: str) -> bytes:
        items = split_elements(memoryview(self._decode_token(scope, token)))
        return b"[%b]" % b",".join(piece for each in items for piece in _to_compactable_items(each))

    def _derive_tenant(self, scope: Scope, secret: bytes) -> str:
        headers = scope["headers"]
        return self._identities.identify_client(headers, build_header_map(headers), secret).tenant


def _to_compactable_items(item: bytes) -> Iterator[bytes]:
    """Yields the items that replace one decrypted item before it is compacted again.

    The reason is given at the parameter `for_compaction` of `CompactionItemCodec.decrypt_items_in_body`.
    """
    kind, role = read_type_and_role(item)
    text = PARSER.parse_message(item).text if kind in {"", "message"} and role == "user" else ""
    if text.startswith(LEDGER_OPENING):
        user_texts, observed = parse_ledger(text)
        yield from (encode_message(Message("user", each)) for each in user_texts)
        if observed:
            yield encode_message(Message("assistant", observed))
    elif text.startswith(_OPENINGS):
        yield encode_message(Message("assistant", _MARKS.sub("", text)))
    else:
        yield item
