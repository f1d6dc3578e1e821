"""`forget`: deletes what is stored of a tenant, or of one of its conversations."""

from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import ProxyError, StoreUnavailable
from compaction_proxy.gateway.headers import Headers
from compaction_proxy.gateway.identity import conversation, origin, tenant
from compaction_proxy.runtime import Secret, opened_store
from compaction_proxy.storage.envelope import unpack
from compaction_proxy.storage.keys import roots_key, scope_prefix, tenant_key, tenant_prefix
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.event_history import KEPT_ROOT_LINES


async def forget(config: Config, credential: Headers, session: Headers | None) -> int:
    """Delete everything stored of who shows this credential, or of one session of theirs; how many records.

    Args:
        config: The configuration of the proxy that stored them.
        credential: The header fields that the client sends.
        session: The header field that names its session; None for all of them.

    Raises:
        ProxyError: The store cannot be used, or the session's header is none that the proxy looks at.
    """
    url = config.store.url or "memory://"
    store = opened_store(config, url)
    secret = Secret(config, url, store)
    try:
        if not await secret.agree():
            raise ProxyError("the store cannot be reached")
        where, mode = origin(config.upstream.base_url), config.session.tenant
        who = tenant(credential, secret.value, where, mode, known=bool(config.server.client_keys))
        if session is None:
            return await store.delete(tenant_prefix(who))
        named = conversation(session, config.session.headers, secret.value, who)
        if named is None:
            raise ProxyError("session.headers names no such header, or its value is no session id")
        return await _conversation(store, who, named)
    except StoreUnavailable as error:
        raise ProxyError(f"the store cannot be used: {error.reason}") from error
    finally:
        await store.close()


async def _conversation(store: Store, who: str, named: str) -> int:
    lines = await store.tail(roots_key(who, named), KEPT_ROOT_LINES)
    roots = {fields["root"] for line in lines if (fields := unpack(line)) and "root" in fields}
    scopes: list[str | bytes] = [named, *(bytes.fromhex(root) for root in roots)]
    deleted = await store.delete(tenant_key(named))
    for scope in scopes:
        deleted += await store.delete(scope_prefix(who, scope))
    return deleted
