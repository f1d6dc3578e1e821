"""What degrades a proxy is said in its banner, at /readyz, by `doctor`, by `health` and on the overview.

A proxy whose store or summary model cannot be used answers requests and stays ready. It says what is wrong in
sentences, and blames the key of the configuration that is wrong.
"""

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.free_ports import find_free_port
from tests.helpers.redis_servers import RedisServer
from tests.system.black_box import (
    Provider,
    Proxy,
    Received,
    Reply,
    chat_reply,
    run_command,
    run_proxy,
)

PATH = "/v1/chat/completions"
ASK = {"model": "big", "messages": [{"role": "user", "content": "Which port?"}]}
RIGHT_KEY = "sk-right"


def answer(request: Received, models: tuple[str, ...] = ("big", "cheap"), *, has_list: bool = True) -> Reply:
    """A provider that knows its models and one key; requests without a key are let in."""
    if request.headers.get("authorization", f"Bearer {RIGHT_KEY}") != f"Bearer {RIGHT_KEY}":
        return Reply(401, b'{"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}')
    if request.method == "GET":
        rows = [{"id": name, "object": "model"} for name in models]
        return Reply(body=json.dumps({"object": "list", "data": rows}).encode()) if has_list else Reply(404)
    if request.json()["model"] not in models:
        return Reply(404, b'{"error": {"message": "no such model", "code": "model_not_found"}}')
    return chat_reply(request, "A summary of what was said before. " * 20)


@pytest.fixture
def provider() -> Iterator[Provider]:
    provider = Provider(answer)
    yield provider
    provider.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.close()


def read_banner(proxy: Proxy) -> list[str]:
    """What the banner says of degradation."""
    words = [line.split(maxsplit=1) for line in proxy.banner]
    return [text[1] for text in words if text[0] == "degraded"]


def read_ready(proxy: Proxy) -> dict[str, Any]:
    reply = httpx.get(f"{proxy.url}/readyz")
    assert reply.status_code == 200
    fields: dict[str, Any] = reply.json()
    return fields


def read_notices(proxy: Proxy) -> list[str]:
    """The notices of the overview, as text."""
    page = httpx.get(f"{proxy.url}/ui", timeout=60)
    assert page.status_code == 200
    notices = re.findall(r'<p class="notice bad" role="status">(.*?)</p>', page.text, re.DOTALL)
    return [" ".join(unescape(re.sub(r"<[^>]+>", "", each)).split()) for each in notices]


def diagnose(proxy: Proxy, upstream: str, topic: str, *options: str, **environ: str) -> list[dict[str, str]]:
    """What `doctor` finds wrong with a topic, with the configuration of a proxy."""
    arguments = ("doctor", "--json", "--config", str(proxy.folder / "config.json"), "--upstream", upstream)
    done = run_command(proxy.folder, *arguments, *options, environ=environ)
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)["findings"]
    return [each for each in found if each["topic"] == topic and each["level"] not in ("ok", "note")]


def check_all_places(proxy: Proxy, what: str, fix: str) -> None:
    """The sentence stands in the banner, at /readyz, in `health` and on the overview."""
    assert read_banner(proxy) == [f"{what} {fix}"]
    ready = read_ready(proxy)
    assert (ready["status"], ready["ready"], ready["problems"]) == ("degraded", True, [what])
    health = run_command(proxy.folder, "health", "--url", proxy.url)
    assert (health.returncode, health.stdout) == (0, f"{proxy.url}: ready, but degraded: {what}\n")
    assert read_notices(proxy) == [f"{what} {fix}"]
    with proxy.client() as client:
        assert client.post(PATH, json=ASK).status_code == 200


def test_a_sound_proxy_says_nothing_of_the_kind(provider: Provider, tmp_path: Path) -> None:
    config = {"summary": {"model": "cheap"}, "upstream": {"api_key": RIGHT_KEY}}
    with run_proxy(tmp_path, provider.url, config) as proxy:
        assert (read_banner(proxy), read_notices(proxy)) == ([], [])
        assert read_ready(proxy).keys() == {"status", "ready", "store", "version"}
        assert read_ready(proxy)["status"] == "ok"
        assert diagnose(proxy, provider.url, "summary model") == []


def test_a_redis_that_is_away_is_said_with_the_key_that_names_it(provider: Provider, tmp_path: Path) -> None:
    url = f"redis://user:hunter2@127.0.0.1:{find_free_port()}/0"
    shown = url.replace("hunter2", "********")
    with run_proxy(tmp_path, provider.url, {"store": {"url": url}}) as proxy:
        what = "The store cannot be reached: connection refused."
        check_all_places(proxy, what, f"At {shown}: start the server, or correct store.url.")
        assert read_ready(proxy)["store"] == "down"
        [finding] = diagnose(proxy, provider.url, "store")
        assert finding["what"] == f"{shown} cannot be reached: connection refused"
        assert finding["fix"] == "start the server, or correct store.url"


def test_the_variable_of_redis_is_blamed_where_it_names_the_store(provider: Provider, tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{find_free_port()}/0"
    with run_proxy(tmp_path, provider.url, {"store": {}}, environ={"REDIS_URL": url}) as proxy:
        what = "The store cannot be reached: connection refused."
        check_all_places(proxy, what, f"At {url}: start the server, or correct $REDIS_URL.")
        [finding] = diagnose(proxy, provider.url, "store", REDIS_URL=url)
        assert finding["fix"] == "start the server, or correct $REDIS_URL"


def test_a_redis_that_refuses_the_password_is_told_from_one_that_is_away(
    provider: Provider, server: RedisServer, tmp_path: Path
) -> None:
    server.admin.config_set("requirepass", "right")
    with run_proxy(tmp_path, provider.url, {"store": {"url": server.url}}) as proxy:
        what = "The store refuses the user name or the password."
        fix = "correct the user name and the password in store.url"
        check_all_places(proxy, what, f"At {server.url}: {fix}.")
        [finding] = diagnose(proxy, provider.url, "store")
        assert finding["fix"] == fix


def test_a_redis_that_comes_back_ends_the_degradation(
    provider: Provider, server: RedisServer, tmp_path: Path
) -> None:
    server.kill()
    with run_proxy(tmp_path, provider.url, {"store": {"url": server.url}}) as proxy:
        assert read_ready(proxy)["status"] == "degraded"
        server.start()
        proxy.wait_for(lambda: read_ready(proxy)["status"] == "ok", "the store is used again")
        assert read_notices(proxy) == []


def test_a_redis_that_takes_no_more_data_is_said(
    provider: Provider, server: RedisServer, tmp_path: Path
) -> None:
    with run_proxy(tmp_path, provider.url, {"store": {"url": server.url}}) as proxy, proxy.client() as client:
        assert read_ready(proxy)["status"] == "ok"
        server.admin.config_set("maxmemory", 1)

        def find_problems() -> Any:
            client.post(PATH, json=ASK).raise_for_status()
            return read_ready(proxy).get("problems")

        problems = proxy.wait_for(find_problems, "a write is refused")
        assert problems == ["The store is full."]
        assert read_ready(proxy)["store"] == "ok"


def test_a_path_that_cannot_be_written_to_is_said(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    url = f"sqlite:///{tmp_path}/taken/state.db"
    with run_proxy(tmp_path, provider.url, {"store": {"url": url}}) as proxy:
        what = "The store cannot be opened for writing: a file exists in place of the folder."
        fix = "give this user write permission, or set another file in store.url"
        check_all_places(proxy, what, f"At {url}: {fix}.")
        [finding] = diagnose(proxy, provider.url, "store")
        assert finding["what"] == f"{tmp_path}/taken/state.db: {tmp_path}/taken is a file, not a folder"
        assert finding["fix"] == "set another path in store.url"


def test_a_store_that_is_no_store_is_said(provider: Provider, tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"this is no database, but long enough to look like one" * 99)
    url = f"sqlite:///{tmp_path}/state.db"
    with run_proxy(tmp_path, provider.url, {"store": {"url": url}}) as proxy:
        fix = "restore the file from a backup, or move it away; the proxy then creates a new one"
        check_all_places(proxy, "The store is damaged.", f"At {url}: {fix}.")
        [finding] = [each for each in diagnose(proxy, provider.url, "store") if each["level"] == "error"]
        assert finding["fix"] == fix


def test_a_user_without_a_folder_for_data_is_told_that_nothing_is_kept(
    provider: Provider, tmp_path: Path
) -> None:
    with run_proxy(tmp_path, provider.url, {"store": {}}, environ={"HOME": ""}) as proxy:
        what = "Data is lost when this process ends, because the proxy has no writable data folder."
        check_all_places(proxy, what, "Set store.url to a file or a server.")
        [finding] = diagnose(proxy, provider.url, "store", HOME="")
        assert finding["fix"] == "Set store.url to a file or a server."


def test_a_summary_model_that_the_provider_lacks_is_said(provider: Provider, tmp_path: Path) -> None:
    with run_proxy(tmp_path, provider.url, {"summary": {"model": "gone"}}) as proxy:
        what = "The provider does not have the summary model."
        fix = f"'gone' is not among the models of {provider.url}. Set summary.model to another model."
        check_all_places(proxy, what, fix)
        [finding] = diagnose(proxy, provider.url, "summary model")
        assert finding["what"] == f"gone: {provider.url} lists 2 models, but not this one"
        assert finding["fix"] == "set summary.model to one of these models"


@pytest.mark.parametrize("owner", ["summary", "upstream"])
def test_the_key_that_a_provider_of_summaries_refuses_is_the_one_that_is_blamed(
    owner: str, provider: Provider, tmp_path: Path
) -> None:
    keys = {"summary": RIGHT_KEY, "upstream": RIGHT_KEY, owner: "sk-wrong"}
    own = {"api_key": keys["summary"]} if owner == "summary" else {}
    config = {"summary": {"model": "cheap", **own}, "upstream": {"api_key": keys["upstream"]}}
    with run_proxy(tmp_path, provider.url, config) as proxy:
        what = "The provider of the summary model rejects the API key."
        fix = f"Set {owner}.api_key to a key that {provider.url} accepts."
        assert read_banner(proxy) == [f"{what} {fix}"]
        assert read_ready(proxy)["problems"] == [what]
        assert read_notices(proxy) == [f"{what} {fix}"]
        [finding] = diagnose(proxy, provider.url, "summary model")
        assert finding["what"] == f"cheap: {provider.url} rejects {owner}.api_key (401)"
        assert finding["fix"] == f"set a valid key in {owner}.api_key"
        upstream = diagnose(proxy, provider.url, "upstream")
        assert [each["fix"] for each in upstream] == (
            ["set a valid key in upstream.api_key"] if owner == "upstream" else []
        )
        [probed] = diagnose(proxy, provider.url, "summary probe", "--probe")
        assert probed["what"] == "cheap: the provider of the summary model rejected the API key (http-401)"
        assert probed["fix"] == f"correct {owner}.api_key"


def test_two_models_with_the_same_problem_are_one_sentence_at_the_health_check(
    provider: Provider, tmp_path: Path
) -> None:
    config = {"summary": {"model": "gone"}, "models": {"my-*": {"summary": {"model": "away"}}}}
    with run_proxy(tmp_path, provider.url, config) as proxy:
        assert len(read_banner(proxy)) == 2
        assert read_ready(proxy)["problems"] == ["The provider does not have the summary model."]


def test_doctor_asks_a_provider_that_does_not_answer_once(provider: Provider, tmp_path: Path) -> None:
    provider.answer = lambda _: Reply(0)
    (tmp_path / "config.yaml").write_text(json.dumps({"summary": {"model": "cheap"}}))
    done = run_command(tmp_path, "doctor", "--json", "--upstream", provider.url)
    topics = [each["topic"] for each in json.loads(done.stdout)["findings"] if each["level"] == "error"]
    assert topics == ["upstream", "summary model"]
    assert [each.path for each in provider.asked] == ["/v1/models"]


def test_the_key_of_a_glob_is_blamed_where_it_names_the_model(provider: Provider, tmp_path: Path) -> None:
    config = {"models": {"my-*": {"summary": {"model": "gone"}}}}
    with run_proxy(tmp_path, provider.url, config) as proxy:
        [line] = read_banner(proxy)
        assert line.endswith(" Set models.my-*.summary.model to another model.")


def test_a_provider_of_summaries_that_is_away_is_said(provider: Provider, tmp_path: Path) -> None:
    away = f"http://127.0.0.1:{find_free_port()}/v1"
    config = {"summary": {"model": "cheap", "base_url": away, "api_key": "sk-x"}}
    with run_proxy(tmp_path, provider.url, config) as proxy:
        what = "The provider of the summary model cannot be reached."
        check_all_places(proxy, what, f"Start the server at {away}, or correct summary.base_url.")
        [finding] = diagnose(proxy, provider.url, "summary model")
        assert finding["what"] == f"cheap: {away} cannot be reached: connection refused"
        assert finding["fix"] == "correct summary.base_url, or start the server"


def test_a_summary_model_that_turns_out_to_be_missing_is_said_and_taken_back(
    provider: Provider, tmp_path: Path
) -> None:
    provider.answer = lambda request: answer(request, has_list=False)
    config = {
        "summary": {"model": "gone"},
        "compaction": {"trigger": [{"tokens": 2_000}], "strategy": "chained", "keep": {"messages": 2}},
    }

    def ask(number: int) -> None:
        texts = [f"Part {number}-{part}: " + "some words about it " * 60 for part in range(12)]
        messages = [
            {"role": ("user", "assistant")[part % 2], "content": text} for part, text in enumerate(texts)
        ]
        client.post(
            PATH, json={"model": "big", "messages": [*messages, ASK["messages"][0]]}
        ).raise_for_status()

    with run_proxy(tmp_path, provider.url, config) as proxy, proxy.client() as client:
        assert read_ready(proxy)["status"] == "ok"
        ask(1)
        what = "The provider does not have the summary model."
        assert proxy.wait_for(lambda: read_ready(proxy).get("problems"), "the call fails") == [what]
        provider.answer = lambda request: answer(request, ("big", "gone"), has_list=False)
        ask(2)
        proxy.wait_for(lambda: read_ready(proxy)["status"] == "ok", "the call succeeds")


def test_a_provider_that_fails_is_said_until_it_answers(provider: Provider, tmp_path: Path) -> None:
    what = "A provider does not answer, or answers with server errors."
    with run_proxy(tmp_path, provider.url) as proxy, proxy.client() as client:
        provider.answer = lambda _: Reply(503, b'{"error": {"message": "overloaded"}}')
        for _ in range(3):
            assert client.post(PATH, json=ASK).status_code == 503
        ready = read_ready(proxy)
        assert (ready["status"], ready["ready"], ready["problems"]) == ("degraded", True, [what])
        health = run_command(proxy.folder, "health", "--url", proxy.url)
        assert (health.returncode, health.stdout) == (0, f"{proxy.url}: ready, but degraded: {what}\n")
        (notice,) = read_notices(proxy)
        assert notice.startswith(f"{what} 3 requests in a row to http://127.0.0.1:")
        provider.answer = answer
        assert client.post(PATH, json=ASK).status_code == 200
        assert read_ready(proxy)["status"] == "ok"
        assert read_notices(proxy) == []


def test_no_client_learns_addresses_or_models_from_the_health_check(
    provider: Provider, tmp_path: Path
) -> None:
    config = {"summary": {"model": "secret-model"}, "store": {"url": f"redis://127.0.0.1:{find_free_port()}"}}
    with run_proxy(tmp_path, provider.url, config) as proxy:
        text = httpx.get(f"{proxy.url}/readyz").text
        assert len(json.loads(text).get("problems", ())) == 2
        assert "secret-model" not in text
        assert "127.0.0.1" not in text


def test_workers_report_what_degrades_them_in_the_banner(provider: Provider, tmp_path: Path) -> None:
    config = {"store": {"url": f"redis://127.0.0.1:{find_free_port()}/0"}, "server": {"workers": 2}}
    with run_proxy(tmp_path, provider.url, config) as proxy:
        problems = [line.partition(" At ")[0] for line in read_banner(proxy)]
        assert problems == ["The store cannot be reached: connection refused."]


KEY_FILE = "{folder}/key.pem"
UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "option of Redis": (
        {"store": {"url": "redis://h:1/0?nonsense=1"}},
        "store.url: 'nonsense' is not an option of this URL",
    ),
    "encryption key": (
        {"store": {"url": "memory://", "encryption_keys": ["short"]}},
        "store.encryption_keys: a key must be 32 bytes",
    ),
    "address of another machine": (
        {"server": {"host": "203.0.113.7"}},
        "server.host: cannot listen on 203.0.113.7",
    ),
    "path of the socket": (
        {"server": {"unix_socket": "/nowhere/at/all.sock"}},
        "server.unix_socket: cannot listen on /nowhere",
    ),
    "certificate": (
        {"server": {"tls_certificate": KEY_FILE, "tls_key": KEY_FILE}},
        "server.tls_key: the key must match server.tls_certificate",
    ),
    "large prompt": (
        {"summary": {"prompt_file": "{folder}/large.md"}},
        "summary.prompt_file: the file is larger than",
    ),
    "binary prompt": (
        {"compaction": {"strategies": {"full": {"prompt_file": "{folder}/binary.md"}}}},
        "compaction.strategies.full.prompt_file: the file is not UTF-8",
    ),
    "workers without a folder": (
        {"server": {"workers": 2}},
        "server.workers: several workers need a shared store",
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_check_refuses_what_serve_refuses_in_the_same_words(name: str, tmp_path: Path) -> None:
    sections, words = UNUSABLE[name]
    (tmp_path / "key.pem").write_text("no key")
    (tmp_path / "large.md").write_text("x" * 300_000)
    (tmp_path / "binary.md").write_bytes(b"\xff\xfe\x00")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sections).replace("{folder}", str(tmp_path)))
    home = {"HOME": ""} if name == "workers without a folder" else {}
    checked = run_command(tmp_path, "check", "--config", str(path), environ=home)
    assert not (tmp_path / ".local").exists()  # it has opened no store
    served = run_command(tmp_path, "serve", "--config", str(path), environ=home)
    assert (served.returncode, served.stdout) == (2, "")
    assert (checked.returncode, checked.stdout) == (2, "")
    assert words in checked.stderr
    assert "Traceback" not in checked.stderr
    told = [line for line in served.stderr.splitlines() if not line.startswith("{")]
    assert told == checked.stderr.splitlines()


def test_check_accepts_the_address_of_a_proxy_that_runs(provider: Provider, tmp_path: Path) -> None:
    with run_proxy(tmp_path, provider.url) as proxy:
        port = proxy.url.rpartition(":")[2]
        done = run_command(tmp_path, "check", environ={"COMPACTION_PROXY__SERVER__PORT": port})
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("key", "endpoint"),
    [
        ("upstream.base_url", "/chat/completions"),
        ("upstream.base_url", "/responses"),
        ("upstream.wires.messages.base_url", "/messages"),
        ("summary.base_url", "/chat/completions"),
        ("models.my-*.summary.base_url", "/completions"),
    ],
)
def test_check_warns_of_a_base_url_that_ends_in_an_endpoint(key: str, endpoint: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"summary": {"api_key": "sk-x"}}
    section = config
    *parents, last = key.split(".")
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = f"http://127.0.0.1:9/v1{endpoint}"
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    done = run_command(tmp_path, "check")
    lines = [each for each in done.stderr.splitlines() if "base_url" in each]
    why = f"ends in {endpoint}, but the proxy appends the endpoint itself; remove {endpoint}"
    assert (done.returncode, lines) == (0, [f"warning: {key}: {why}"])


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("COMPACTION_PROXY_STORE_URL", "COMPACTION_PROXY__STORE__URL"),
        ("COMPACTION_PROXY_SERVER__PORT", "COMPACTION_PROXY__SERVER__PORT"),
        ("COMPACTION_PROXY_UPSTREAM_API_KEY_FILE", "COMPACTION_PROXY__UPSTREAM__API_KEY_FILE"),
    ],
)
def test_check_warns_of_variables_with_one_underscore(name: str, right: str, tmp_path: Path) -> None:
    others = {"COMPACTION_PROXY_SERVICE_HOST": "10.0.0.1", "COMPACTION_PROXY_PORT": "tcp://10.0.0.1:4141"}
    done = run_command(tmp_path, "check", environ={**others, name: "hunter2"})
    warning = f"warning: {name}: ignored; the correct name of this variable is {right}\n"
    assert (done.returncode, done.stderr) == (0, warning)


def test_a_variable_with_one_underscore_between_section_and_key_is_refused_with_its_name(
    tmp_path: Path,
) -> None:
    done = run_command(tmp_path, "check", environ={"COMPACTION_PROXY__STORE_URL": "memory://"})
    assert (done.returncode, done.stderr) == (
        2,
        "COMPACTION_PROXY__STORE_URL: store_url: unknown key, did you mean COMPACTION_PROXY__STORE__URL?\n",
    )
