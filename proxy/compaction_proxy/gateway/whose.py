"""Whose a request is and of which conversation: by its headers, else its body, unless it is a side call."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from compaction_proxy.config.config import Config
from compaction_proxy.gateway.headers import Headers
from compaction_proxy.gateway.hints import hint
from compaction_proxy.gateway.identity import Identities, Who
from compaction_proxy.gateway.side_requests import Side, SideCalls
from compaction_proxy.support.offload import beside
from compaction_proxy.wires.incremental_reader import LITTLE_BYTES


class Whose:
    """Tells whose requests are.

    Args:
        config: The configuration.
        origin: The upstream's.
        secret: Gives the key of the digests that tell tenants apart.
    """

    def __init__(self, config: Config, origin: str, secret: Callable[[], bytes]) -> None:
        session = config.session
        known = bool(config.server.client_keys)
        self._identities = Identities(origin, session.tenant, session.headers, known=known)
        self._body_hints = session.body_hints
        self._secret = secret
        self._side_calls = SideCalls()

    def of(self, headers: Headers, first: Mapping[bytes, bytes]) -> Who:
        """Whose a request is, as its header fields say; `first` is the first value of each."""
        return self._identities.of(headers, first, self._secret())

    async def placed(self, who: Who, raw: bytes, first: Mapping[bytes, bytes]) -> tuple[Who, Side | None]:
        """Whose it is now that its body has come, and whether it is a side call.

        One that has nothing of its conversation in it has none.
        """
        if who.conversation is None and self._body_hints:
            found = hint(raw) if len(raw) <= LITTLE_BYTES else await beside(partial(hint, raw))
            if found is not None:
                who = self._identities.hinted(who, found, self._secret())
        side = self._side_calls.told(raw, first, who.conversation)
        return (replace(who, conversation=None) if side is Side.ALONE else who), side
