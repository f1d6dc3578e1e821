"""Encodes and decodes the proxy's compaction items, which hold the result of a compaction in encrypted form.

On the Responses wire, the proxy answers a request for a compaction with such an item. The client sends the
item back in later requests. Before the proxy forwards such a request, it replaces the item with the item's
decrypted content.
"""

import base64
import binascii
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module

from starlette.types import Scope

from compaction_proxy.compaction.replacements import LEDGER_OPENING
from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.core.ledger.ledger import parse_ledger
from compaction_proxy.core.message import Message
from compaction_proxy.core.strategies import STRATEGIES
from compaction_proxy.gateway.identity import IdentityResolver
from compaction_proxy.support.offload import run_in_worker_if_large
from compaction_proxy.wires.json.slices import split_elements
from compaction_proxy.wires.responses.compaction_item import TOKEN_PREFIX, expand_tokens, may_have_token
from compaction_proxy.wires.responses.messages import PARSER, encode_message, read_type_and_role

# The module that encrypts and decrypts compaction items. It is imported only when the first item is
# processed, because the library that it uses takes 8 MB of memory.
_CIPHER = "compaction_proxy.gateway.compaction_cipher"
# For each strategy, the text with which its replacements begin, up to the round number in this text. A user
# message that begins with one of these texts was written by the proxy.
_OPENINGS = tuple(
    {opening for each in STRATEGIES.values() if (opening := each.frame.opening.partition("{round}")[0])}
)
# Matches bullets and handles (`m_…`). The proxy removes both from a replacement before it compacts the
# replacement again. Otherwise each compaction would add new bullets and handles to the old ones. The handles
# are of no use, because the messages that they name are not stored.
_MARKS = re.compile(r"^(?:- )+| [\[(]m_[0-9a-f]+[\])]", re.MULTILINE)


class CompactionItemCodec:
    """Encrypts and decrypts compaction items.

    Only the tenant for which an item was encrypted can use it. Unlike the tenant in store keys, this tenant
    depends only on the client's credential (`session.tenant`) and not on the upstream. So a conversation can
    continue after `upstream.base_url` has changed.

    Args:
        config: The configuration.
        get_secrets: Returns the installation's secrets. The first one is used to encrypt. To decrypt, each of
            them is tried.
    """

    def __init__(self, config: Config, get_secrets: Callable[[], tuple[bytes, ...]]) -> None:
        self._identity_resolver = IdentityResolver(config, "", lambda: get_secrets()[0])
        self._get_secrets = get_secrets

    def encode_token(self, items: bytes, scope: Scope) -> str:
        """Returns a token that holds items in encrypted form.

        Args:
            items: The items, as a JSON array.
            scope: The ASGI scope of the request. Only the tenant of this request can use the token.
        """
        secret = self._get_secrets()[0]
        tenant = self._identity_resolver.identify_client(scope["headers"], secret).tenant
        ciphertext = import_module(_CIPHER).encrypt_item(secret, tenant, items)
        return TOKEN_PREFIX + base64.urlsafe_b64encode(ciphertext).decode()

    async def decrypt_items_in_body(self, raw: bytes, scope: Scope, *, for_compaction: bool = False) -> bytes:
        """Returns a body in which the proxy's compaction items are replaced with their decrypted content.

        A body without such items is returned unchanged. Nothing else in the body changes.

        Args:
            raw: The request body.
            scope: The ASGI scope of the request.
            for_compaction: Whether the body will be compacted again. If so, the user's words that a ledger
                quotes become messages of the user, and all other text that the proxy wrote becomes messages
                of the assistant. So the next compaction does not mistake a summary or a tool result for the
                user's words.

        Raises:
            RequestRefusedError: With status 400 and code `invalid_encrypted_content` if one of the proxy's
                items is altered or belongs to another tenant.
        """
        if not await run_in_worker_if_large(len(raw), partial(may_have_token, raw)):
            return raw
        open_token = partial(self._decode_for_compaction if for_compaction else self._decode_token, scope)
        work = partial(expand_tokens, raw, open_token, with_latest=for_compaction)
        return await run_in_worker_if_large(len(raw), work)

    def _decode_token(self, scope: Scope, token: str) -> bytes:
        try:
            ciphertext = base64.b64decode(token.removeprefix(TOKEN_PREFIX), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            ciphertext = b""
        for secret in self._get_secrets():
            tenant = self._identity_resolver.identify_client(scope["headers"], secret).tenant
            plain: bytes | None = import_module(_CIPHER).decrypt_item(secret, tenant, ciphertext)
            if plain is not None:
                return plain
        message = "The encrypted content of a compaction item could not be verified."
        raise RequestRefusedError(400, message, "invalid_encrypted_content")

    def _decode_for_compaction(self, scope: Scope, token: str) -> bytes:
        items = split_elements(memoryview(self._decode_token(scope, token)))
        return b"[%b]" % b",".join(piece for each in items for piece in _to_compactable_items(each))


def _to_compactable_items(item: bytes) -> Iterator[bytes]:
    """Yields the items that replace one decrypted item before it is compacted again.

    The user's words that a ledger quotes become messages of the user. The rest of the ledger, and any other
    replacement, becomes a message of the assistant. So the next compaction does not mistake text that the
    proxy wrote for the user's words. An item of another kind stays unchanged.
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
