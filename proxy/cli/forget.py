"""`forget`: deletes what is stored of a tenant, or of one of its conversations."""

from proxy.config.model import Config
from proxy.core.envelope import unpack
from proxy.core.keys import roots_key, scope_prefix, tenant_key, tenant_prefix
from proxy.errors import ProxyError, StoreUnavailable
from proxy.history import KEPT_ROOT_LINES
from proxy.installation import Secret, opened_store
from proxy.ports import Store
from proxy.relay.headers import Headers
from proxy.relay.identity import conversation, origin, tenant


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
