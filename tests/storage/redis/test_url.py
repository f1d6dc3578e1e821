import pytest

from compaction_proxy.core.errors import ConfigError
from compaction_proxy.storage.redis.url import RedisUrl, is_redis_url, parse_redis_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", RedisUrl("standalone", (("h", 6379),))),
        ("valkey://h:1/", RedisUrl("standalone", (("h", 1),))),
        (
            "redis://u:p%40%2F@h:1/7?prefix=x:&max_connections=4",
            RedisUrl(
                "standalone",
                (("h", 1),),
                database=7,
                username="u",
                password="p@/",
                prefix="x:",
                max_connections=4,
            ),
        ),
        ("redis://:p:w@[::1]:7", RedisUrl("standalone", (("::1", 7),), password="p:w")),
        ("redis://[::1]", RedisUrl("standalone", (("::1", 6379),))),
        (
            "rediss://h?ssl_ca_certs=/ca.pem&ssl_check_hostname=false",
            RedisUrl(
                "standalone",
                (("h", 6379),),
                tls=True,
                tls_options={"ssl_ca_certs": "/ca.pem", "ssl_check_hostname": False},
            ),
        ),
        (
            "valkeys://h?ssl_cert_reqs=none",
            RedisUrl(
                "standalone",
                (("h", 6379),),
                tls=True,
                tls_options={"ssl_cert_reqs": "none", "ssl_check_hostname": False},
            ),
        ),
        (
            "redis+unix://u:p@/run/r.sock?db=2",
            RedisUrl("unix", socket="/run/r.sock", database=2, username="u", password="p"),
        ),
        (
            "redis+sentinel://u:p@a:1,b/my/3?sentinel_username=s&sentinel_password=t",
            RedisUrl(
                "sentinel",
                (("a", 1), ("b", 26379)),
                service="my",
                database=3,
                username="u",
                password="p",
                sentinel_username="s",
                sentinel_password="t",
            ),
        ),
        ("rediss+cluster://:p@a,b:2", RedisUrl("cluster", (("a", 6379), ("b", 2)), password="p", tls=True)),
    ],
)
def test_a_url_says_where_the_servers_are(url: str, expected: RedisUrl) -> None:
    assert is_redis_url(url)
    assert parse_redis_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://:hunter2@",
        "redis://:hunter2@h:port",
        "redis://:hunter2@h:70000",
        "redis://:hunter2@h:0",
        "redis://:hunter2@h/name",
        "redis://:hunter2@h/0/1",
        "redis://:hunter2@a,b",
        "redis://:hunt#er2@h",
        "redis://:hunter2@[h",
        "redis://:hunter2@h?db=1",
        "redis://:hunter2@h?socket_timeout=hunter2",
        "redis://:hunter2@h?prefix=a&prefix=b",
        "redis://:hunter2@h?prefix",
        "redis://:hunter2@h?prefix={x}",
        "redis://:hunter2@h?max_connections=0",
        "redis://:hunter2@h?ssl_ca_certs=/hunter2",
        "rediss://:hunter2@h?ssl_cert_reqs=hunter2",
        "rediss://:hunter2@h?ssl_check_hostname=1",
        "redis+cluster://:hunter2@h/1",
        "redis+sentinel://:hunter2@h",
        "redis+unix://host/path",
        "redis+unix:///",
        "sqlite:///hunter2",
    ],
)
def test_what_cannot_be_understood_is_a_config_error_that_shows_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url)

    assert str(caught.value).startswith("store.url: ")
    assert "hunt" not in str(caught.value)


def test_a_password_is_not_part_of_what_is_printed() -> None:
    printed = repr(parse_redis_url("redis+sentinel://u:hunter2@h/s?sentinel_password=hunter2"))

    assert "hunter2" not in printed
