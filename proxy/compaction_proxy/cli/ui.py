"""Defines the command `ui`, which prints a link to the dashboard of a running proxy."""

import sys

from compaction_proxy.cli.admin_client import create_admin_client
from compaction_proxy.cli.console import ConfigOption, KeyOption, UrlOption
from compaction_proxy.core.errors import ProxyError


def ui(url: UrlOption = None, key_file: KeyOption = None, config: ConfigOption = None) -> None:
    """Print a link that opens the dashboard in a browser, once and within 60 seconds."""
    from compaction_proxy.admin.browser_sessions import LINK_TTL_S, build_link
    from compaction_proxy.config.sections import NO_ADMIN_KEY
    from compaction_proxy.gateway.paths import DASHBOARD_PATH

    client = create_admin_client(url, key_file, config)
    if client.unix_socket is not None:
        raise ProxyError(f"{client.display_url}: browsers cannot connect to a Unix socket")
    # This request reports a proxy that does not run and a wrong key, so that the browser does not have to. If
    # the path of the URL is wrong, a provider may answer it.
    configuration = client.get("/config")
    if not isinstance(configuration, dict) or "values" not in configuration:
        raise ProxyError(f"{client.display_url}: the server is not a compaction-proxy")
    url, key = client.url + DASHBOARD_PATH, client.headers.get("authorization", "").removeprefix("Bearer ")
    if key in {"", NO_ADMIN_KEY}:
        print(url)  # the proxy has just answered without a key
        return
    print(build_link(url, key))
    print(f"The link works once, for {LINK_TTL_S} seconds.", file=sys.stderr)
