import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_proxy.core.errors import RequestRefusedError
from compaction_proxy.gateway.paths import is_own_path, join_upstream_url
from compaction_proxy.wires.registry import find_wire


@pytest.mark.parametrize(
    "raw_path",
    [
        b"/v1/chat/completions",
        b"/chat/completions",
        b"/openai/deployments/gpt%204/chat/completions",
        b"/v1beta/openai/chat/completions",
    ],
)
def test_posts_whose_path_ends_in_chat_completions_are_compacted(raw_path: bytes) -> None:
    wire = find_wire("POST", raw_path)
    assert wire is not None
    assert wire.name == "chat"


@pytest.mark.parametrize(
    ("method", "raw_path"),
    [
        ("GET", b"/v1/chat/completions"),
        ("OPTIONS", b"/v1/chat/completions"),
        ("POST", b"/v1/chat/completions/"),
        ("POST", b"/v1/chat/completions/abc"),
        ("POST", b"/v1/chat%2Fcompletions"),
        ("POST", b"/v1/completions"),
    ],
)
def test_nothing_else_is_compacted(method: str, raw_path: bytes) -> None:
    assert find_wire(method, raw_path) is None


@pytest.mark.parametrize(
    "path",
    [
        "/livez",
        "/readyz",
        "/healthz",
        "/health",
        "/health/liveliness",
        "/health/liveness",
        "/health/readiness",
        "/metrics",
        "/admin",
        "/admin/sessions",
        "/ui",
        "/ui/",
        "/ui/session/c_1",
        "/mcp",
        "/mcp/messages",
        "/v1/compact",
    ],
)
def test_our_own_paths_move_with_the_base_path(path: str) -> None:
    assert is_own_path(path)
    assert is_own_path("/compaction" + path, "/compaction")
    assert not is_own_path(path, "/compaction")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "/v1/models",
        "/v1/admin",
        "/administrator",
        "/uixyz",
        "/healthy",
        "/health/x",
        "/livez/",
        "admin",
    ],
)
def test_every_other_path_is_relayed(path: str) -> None:
    assert not is_own_path(path)


@pytest.mark.parametrize(
    ("base_url", "raw_path", "query", "expected"),
    [
        ("https://a.example/v1", b"/v1/models", b"", ("https://a.example", b"/v1/models")),
        ("https://a.example/v1/", b"/v1/models", b"", ("https://a.example", b"/v1/models")),
        ("https://a.example/v1", b"/models", b"", ("https://a.example", b"/v1/models")),
        ("https://a.example", b"/v1/models", b"", ("https://a.example", b"/v1/models")),
        ("https://a.example", b"/", b"", ("https://a.example", b"/")),
        ("https://a.example", b"", b"", ("https://a.example", b"/")),
        ("https://a.example/v1", b"/v1", b"", ("https://a.example", b"/v1")),
        ("https://a.example/v1", b"/v1beta/x", b"", ("https://a.example", b"/v1/v1beta/x")),
        ("https://a.example/av1", b"/v1/x", b"", ("https://a.example", b"/av1/v1/x")),
        ("https://a.example/api/v1", b"/v1/v1/x", b"", ("https://a.example", b"/api/v1/v1/x")),
        ("https://a.example/openai", b"/v1/x", b"", ("https://a.example", b"/openai/v1/x")),
        ("http://a:8080/v1", b"/files/a%2Fb%20c", b"", ("http://a:8080", b"/v1/files/a%2Fb%20c")),
        ("http://[::1]:8080", b"//x/../y", b"a=%2F&a=+&b", ("http://[::1]:8080", b"//x/../y?a=%2F&a=+&b")),
        (
            "https://r.example",
            b"/openai/deployments/d/chat/completions",
            b"api-version=2024-10-21",
            ("https://r.example", b"/openai/deployments/d/chat/completions?api-version=2024-10-21"),
        ),
    ],
)
def test_the_client_path_is_appended_byte_for_byte(
    base_url: str, raw_path: bytes, query: bytes, expected: tuple[str, bytes]
) -> None:
    assert join_upstream_url(base_url, raw_path, query) == expected


@given(st.binary(max_size=40).map(lambda path: path.replace(b"\\", b"/")), st.binary(max_size=40))
def test_a_target_ends_in_the_clients_own_bytes(path: bytes, query: bytes) -> None:
    _, target = join_upstream_url("http://a.example/base", b"/" + path, query)
    assert target == b"/base/" + path + (b"?" + query if query else b"")


@pytest.mark.parametrize(
    "raw_path",
    [
        b"/v1/../admin",
        b"/v1/%2e%2E/admin",
        b"/..",
        b"/v1/..%2fadmin",
        b"/v1/a/../../b",
        b"/v1//../b",
        b"*",
        b"/v1/..;/admin",
        b"/v1/%2e%2e;x=1/admin",
    ],
)
def test_no_path_leaves_the_base_of_the_upstream(raw_path: bytes) -> None:
    with pytest.raises(RequestRefusedError, match="outside the base URL") as refused:
        join_upstream_url("https://host/tenant/v1", raw_path, b"")
    assert refused.value.status == 400


@pytest.mark.parametrize("raw_path", [b"/v1/..\\admin", b"/v1/a\\b", b"/v1/a%5cb", b"/v1/a%5Cb"])
def test_a_backslash_is_refused_because_some_servers_read_it_as_a_slash(raw_path: bytes) -> None:
    with pytest.raises(RequestRefusedError, match="backslash") as refused:
        join_upstream_url("https://host/v1", raw_path, b"")
    assert refused.value.status == 400


@pytest.mark.parametrize("raw_path", [b"/v1/...", b"/v1/a..b/c", b"/v1/a/../b", b"/v1/..a", b"/v1/a/%2e%2e"])
def test_dots_that_stay_below_it_go_on_as_they_are(raw_path: bytes) -> None:
    assert join_upstream_url("https://host/v1", raw_path, b"") == ("https://host", raw_path)
