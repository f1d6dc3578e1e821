"""Deletes the stored data of a tenant or of one of its conversations, for the command `forget`."""

import asyncio

from compaction_proxy.config.config import Config
from compaction_proxy.core.errors import ProxyError, StoreUnavailableError
from compaction_proxy.gateway.headers import Headers
from compaction_proxy.gateway.identity import (
    derive_tenant,
    find_conversation_id,
    format_origin,
    list_tenant_fields,
)
from compaction_proxy.runtime import TenantSecret, open_configured_store
from compaction_proxy.storage.envelope import unpack
from compaction_proxy.storage.keys import conversation_tenant_key, roots_key, scope_prefix, tenant_prefix
from compaction_proxy.storage.records import DELETE_LIMIT_S
from compaction_proxy.storage.store import Store
from compaction_proxy.telemetry.event_history import KEPT_ROOT_LINES


async def forget_client(config: Config, credential: Headers, session: Headers | None) -> int:
    """Deletes the stored data of a client, or of one session of the client.

    Returns the number of deleted values.

    Args:
        config: The configuration of the proxy that stored the data.
        credential: The header fields with the client's credential.
        session: The header field with the id of the session. None deletes all data of the client's tenant.

    Raises:
        ProxyError: If the credential identifies no client, if the store cannot be used, if the configuration
            key `session.headers` does not list the session header, or if the header's value is not a session
            id.
    """
    mode = config.session.tenant
    is_identifying = any(name in list_tenant_fields(mode) and value.strip() for name, value in credential)
    if mode != "none" and not is_identifying:  # it would stand for all clients without a credential
        raise ProxyError(f"--credential: this header identifies no client, because session.tenant is {mode}")
    url = config.store.url or "memory://"
    store = open_configured_store(config, url)
    secret = TenantSecret(config, url, store)
    try:
        async with asyncio.timeout(DELETE_LIMIT_S):
            return await _delete_data(config, store, secret, credential, session)
    except StoreUnavailableError as error:
        raise ProxyError(f"the store cannot be used: {error.reason}") from error
    except TimeoutError as error:
        raise ProxyError("the store does not answer in time") from error
    finally:
        await store.close()


async def _delete_data(
    config: Config, store: Store, secret: TenantSecret, credential: Headers, session: Headers | None
) -> int:
    if not await secret.sync_with_store():
        raise ProxyError("the store cannot be reached")
    origin, mode = format_origin(config.upstream.base_url), config.session.tenant
    tenant_id = derive_tenant(
        credential, secret.current_key, origin, mode, is_client_key=bool(config.server.client_keys)
    )
    if session is None:
        return await store.delete_prefix(tenant_prefix(tenant_id))
    conversation = find_conversation_id(session, config.session.headers, secret.current_key, tenant_id)
    if conversation is None:
        raise ProxyError(
            "session.headers does not contain this header, or its value is not a valid session id"
        )
    return await _delete_conversation(store, tenant_id, conversation)


async def _delete_conversation(store: Store, tenant_id: str, conversation_id: str) -> int:
    lines = await store.read_tail(roots_key(tenant_id, conversation_id), KEPT_ROOT_LINES)
    roots = {fields["root"] for line in lines if (fields := unpack(line)) and "root" in fields}
    scopes: list[str | bytes] = [conversation_id, *(bytes.fromhex(root) for root in roots)]
    deleted = await store.delete_prefix(conversation_tenant_key(conversation_id))
    for scope in scopes:
        deleted += await store.delete_prefix(scope_prefix(tenant_id, scope))
    return deleted
