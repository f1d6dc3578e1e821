"""Cases of the command line, of spans, and of the real conversations that are only measured."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from cases import COMPACTING, JSON_TYPE, Run, make_long, make_small
from doubles import COLLECTOR_PORT, HOST, PORT, Provider, Reply, answer
from golden_conversations import PATHS, WIRES, draw_conversation, write_request
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from product import ADMIN_KEY, KEY, LIMIT_S, PREFIX, SECRET, record_command, run_command, run_product
from recording import Normalizer

from tests.system.black_box import COMMAND

TOOLS_LIMIT = 40


def find_commands(folder: Path, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns every command, as its words; found in the help texts."""
    _, out, _ = run_command([*path, "--help"], folder)
    section = out.partition("Commands:\n")[2]
    names = re.findall(r"^  (\w[\w-]*)", section, re.MULTILINE)
    return [path, *(found for name in names for found in find_commands(folder, (*path, name)))]


def record_help(run: Run) -> None:
    """The help text of every command, and what each says to an option that it does not know."""
    with tempfile.TemporaryDirectory(prefix="goldens-") as made:
        folder = Path(made)
        for words in find_commands(folder):
            case = {"help": record_command([*words, "--help"], folder)}
            if words and not run.is_quick:
                case["unknown option"] = record_command([*words, "--none"], folder)
            run.recording.add(f"help/{' '.join(words) or 'all'}", case)


_CONFIGS = {
    "empty": "",
    "unknown key": "server:\n  prot: 1\n",
    "unknown section": "sever: {port: 1}\n",
    "wrong type": "server: {port: x}\n",
    "out of range": "server: {port: 70000}\ncompaction: {strategies: {anchored: {percent: 200}}}\n",
    "no yaml": "server: [\n",
    "list": "- 1\n",
    "twice": "server: {port: 1}\nserver: {port: 2}\n",
    "boolean": "compaction: {mode: off}\n",
    "unknown strategy": "compaction: {strategy: anchord}\n",
    "unknown field": "compaction: {strategies: {prune: {tag: x}}}\n",
    "trigger": "compaction: {trigger: [{tokns: 1}]}\n",
    "target": "compaction: {target_tokens: 5000, trigger: [{tokens: 100}]}\n",
    "other origin": "summary: {base_url: 'http://example.com/v1'}\n",
    "model": "models: {'a*': {windw: 5}}\n",
    "variable": "server: {admin_key: '${GOLDEN_NONE}', port: '${GOLDEN_PORT:-4242}'}\n",
    "encryption": "store: {encryption_keys: [short]}\n",
    "ttl": "store: {ttl: 5x}\n",
    "store": "store: {url: 'ftp://x'}\n",
    "public": "server: {host: 0.0.0.0}\n",
    "workers": "server: {workers: 2}\nstore: {url: 'memory://'}\n",
    "many errors": "server: {port: x, hots: 1}\nstore: {ttl: 1}\nmodels: 7\n",
    "all right": "models: {'my-*': {window: 32768, prices: {input: 1, output: 2}}}\nserver: {admin_key: secret-one}\n",
}


def record_configs(run: Run) -> None:
    """`check` and `config show` on configurations that are right and wrong, from files and the environment."""
    with tempfile.TemporaryDirectory(prefix="goldens-") as made:
        folder = Path(made)
        path = folder / "given.yaml"
        cases = list(_CONFIGS.items())[:: 4 if run.is_quick else 1]
        for name, text in cases:
            path.write_text(text)
            case = {"check": record_command(["check", "--config", str(path)], folder)}
            if name in {"all right", "unknown key", "variable", "empty"}:
                for more in ([], ["--origin"], ["--json"]):
                    words = ["config", "show", "--config", str(path), *more]
                    case[" ".join(["show", *more])] = record_command(words, folder)
            run.recording.add(f"config/{name}", case)
        environs = {
            "port": {"COMPACTION_PROXY__SERVER__PORT": "5151"},
            "json": {
                "COMPACTION_PROXY__MODELS": '{"a*": {"window": 9000}}',
                "COMPACTION_PROXY__SESSION__HEADERS": '["x-a"]',
            },
            "wrong": {"COMPACTION_PROXY__SERVER__PRT": "1"},
            "no json": {"COMPACTION_PROXY__MODELS": "{"},
            "file": {"COMPACTION_PROXY__SERVER__ADMIN_KEY_FILE": str(folder / "key")},
            "file is away": {"COMPACTION_PROXY__SERVER__ADMIN_KEY_FILE": str(folder / "none")},
            "redis": {"REDIS_URL": "redis://127.0.0.1:1/0"},
            "path": {"COMPACTION_PROXY_CONFIG": str(folder / "away.yaml")},
        }
        (folder / "key").write_text("from-a-file\n")
        for name, environ in environs.items():
            shown = record_command(["config", "show", "--origin"], folder, environ)
            run.recording.add(f"config/environment, {name}", {"show": shown})
        for name in ("unknown key", "no yaml"):
            path.write_text(_CONFIGS[name])
            for words in (["serve"], ["doctor"], ["models"], ["sessions", "list"]):
                case = {"run": record_command([*words, "--config", str(path)], folder)}
                run.recording.add(f"config/{name}, {' '.join(words)}", case)


def record_cli(run: Run) -> None:
    """Commands about a running proxy, about none, and those that need none."""
    texts: dict[str, str] = {}
    with (
        run_product(run.provider, COMPACTING) as product,
        tempfile.TemporaryDirectory(prefix="goldens-") as made,
    ):
        folder = Path(made)
        for wire, number in (("chat", 1), ("messages", 4)):
            body = write_request(wire, draw_conversation(number).messages)
            found = product.post(wire, PATHS[wire], body, [("x-session-id", f"cli-{number}")])
            session = found.header("x-compaction-session")
        product.settle_figures()
        address = product.proxy.url.partition("//")[2]
        texts = {address: "<proxy>", address.rpartition(":")[2]: "<port>", session: "<session>"}
        environ = {"COMPACTION_PROXY__SERVER__ADMIN_KEY": ADMIN_KEY, "COMPACTION_PROXY_KEY": "sk-golden"}
        url = ["--url", product.proxy.url]
        recording = str(folder / "conversation.json")
        Path(recording).write_text(json.dumps(make_long("chat")))
        (folder / "bad.json").write_text("{")
        commands: list[list[str]] = [
            ["version"],
            ["health", *url],
            ["health", "--url", f"http://{HOST}:9"],
            ["sessions", "list", *url, "--json"],
            ["sessions", "list", *url, "--search", "none"],
            ["sessions", "show", session, *url, "--json"],
            ["sessions", "show", "c_none", *url],
            ["sessions", "pin", session, "The port is 4141.", *url],
            ["sessions", "unpin", session, "none", *url],
            ["sessions", "bypass", session, *url],
            ["sessions", "resume", session, *url],
            ["sessions", "compact", session, *url],
            ["sessions", "export", session, *url],
            ["sessions", "undo", session, *url],
            ["search", session, "port", *url],
            ["search", session, "port", "--json", *url],
            ["search", session, "none-of-it", *url],
            ["savings", *url],
            ["savings", "--by", "model", *url],
            ["savings", "--csv", "--by", "total", *url],
            ["savings", "--json", *url],
            ["savings", "--share", *url],
            ["savings", "--since", "x", *url],
            ["models", *url],
            ["models", "--json", *url],
            ["models", "gpt-5.4-mini", *url],
            ["models", "--all", *url],
            ["sessions", "list", "--url", f"http://{HOST}:9"],
            ["sessions", "delete", session, *url],
            ["connect", "--list"],
            ["connect", "none"],
            *(["connect", tool, "--model", "m", *url] for tool in self_named(folder)),
            *(
                ["connect", tool, "--apply", "--model", "m", *url]
                for tool in ("codex", "aider", "continue", "opencode")
            ),
            ["replay", recording],
            [
                "replay",
                recording,
                "--json",
                "--strategy",
                "prune",
                "--strategy",
                "anchored",
                "--window",
                "6000",
            ],
            ["replay", str(folder / "bad.json")],
            ["replay", str(folder / "none.json")],
            ["replay", recording, "--strategy", "x"],
            ["doctor", "--upstream", run.provider.origin + "/v1"],
            ["doctor", "--json", "--upstream", run.provider.origin + "/v1"],
            ["doctor", "--json", "--upstream", f"http://{HOST}:9/v1"],
            ["run", *url, "--", "env"],
            ["run", *url, "--", "sh", "-c", "exit 7"],
            ["run", *url, "--", "/none"],
            ["run", *url, "--", "sh", "-c", "kill -9 $$"],
            ["forget", "--credential", "authorization: Bearer sk-golden"],
            ["forget", "--credential", "x"],
            ["forget"],
            ["none"],
            [],
        ]
        for number, words in enumerate(commands[:: 5 if run.is_quick else 1]):
            case = record_command(words, folder, environ, texts=texts)
            if "env" in words:
                lines = case["stdout"].splitlines()
                case["stdout"] = sorted(
                    line
                    for line in lines
                    if not line.startswith(("PWD=", "_=", "SHLVL=", "OLDPWD=", "PATH=", "LC_"))
                )
            name = Normalizer(texts | {str(folder): "<folder>"}).clean_text(" ".join(words)).replace("/", "|")
            run.recording.add(f"cli/{number:02} {name}"[:90], {"run": case})
        files = {
            str(each.relative_to(folder)): Normalizer(texts | {str(folder): "<folder>"}).clean_body(
                each.read_bytes()
            )
            for each in sorted(folder.rglob("*"))
            if each.is_file()
            and each.suffix in {".toml", ".yaml", ".yml", ".json"}
            and each.name != "conversation.json"
        }
        run.recording.add("cli/files", {"files": files})
        calls = [
            {
                "jsonrpc": "2.0",
                "id": 1,
                "method": "initialize",
                "params": {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {},
                    "clientInfo": {"name": "golden", "version": "1"},
                },
            },
            {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
        ]
        given = [json.dumps(each) for each in calls]
        run.recording.add(
            "cli/mcp", {"run": record_command(["mcp", *url], folder, environ, given=given, texts=texts)}
        )
    if not run.is_quick:
        run.recording.add("cli/demo", {"run": record_demo()})


def record_demo() -> dict[str, Any]:
    """What `demo` prints: rounds are made behind answers there, so on a busy machine one run may differ from others.

    It is run until two runs are the same, but four times at most.
    """
    runs: list[dict[str, Any]] = []
    while True:
        with tempfile.TemporaryDirectory(prefix="goldens-") as made:
            found = record_command(["demo"], Path(made), limit_s=300)
        if found in runs or len(runs) == 3:
            return found
        runs.append(found)


def self_named(folder: Path) -> list[str]:
    """Returns the clients that `connect --list` names."""
    _, out, _ = run_command(["connect", "--list"], folder)
    return [line.split()[0] for line in out.splitlines() if line.strip()][:TOOLS_LIMIT]


def record_signals(run: Run) -> None:
    """What `serve` prints, and how it ends by each signal and where its port is taken."""
    with tempfile.TemporaryDirectory(prefix="goldens-") as made:
        words = ["serve", "--host", HOST, "--port", str(PORT), "--upstream", f"http://{HOST}:9/v1"]
        run.recording.add("serve/port is taken", {"run": record_command(words, Path(made))})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        with (
            tempfile.TemporaryDirectory(prefix="goldens-") as made,
            tempfile.NamedTemporaryFile() as log_file,
        ):
            folder, log_path = Path(made), Path(log_file.name)
            env = {"HOME": made, "PATH": os.environ["PATH"], "COMPACTION_PROXY__SERVER__SECRET": SECRET}
            process = subprocess.Popen(
                [COMMAND, "serve", "--port", "0", "--upstream", run.provider.origin],
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
            )
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "OPENAI_BASE_URL" in line:
                    break
            process.send_signal(number)
            code: int | None = None
            if number == signal.SIGHUP:
                deadline = time.monotonic() + LIMIT_S
                while "config.reloaded" not in log_path.read_text() and time.monotonic() < deadline:
                    time.sleep(0.1)
                process.kill()
            else:
                code = process.wait(LIMIT_S)
            out, _ = process.communicate()
            port = re.search(r":(\d{4,5})", "".join(lines))
            clean = Normalizer({made: "<folder>", PREFIX: "<prefix>", port[1] if port else "none": "<port>"})
            log = [
                {**json.loads(line), "logger": 0, "timestamp": 0} if line.startswith("{") else line
                for line in log_path.read_text().splitlines()
            ]
            files = sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())
            run.recording.add(
                f"serve/{number.name}",
                {
                    "exit": code,
                    "stdout": clean.clean_text("".join(lines) + out),
                    "log": clean.clean(log),
                    "files": [each for each in files if not each.endswith(("-wal", "-shm"))],
                },
            )


# Spans


def record_spans(run: Run) -> None:
    """The spans of requests and rounds, sent to a collector."""
    collector = Provider(
        lambda _: Reply(200, b"", (("content-type", "application/x-protobuf"),)), COLLECTOR_PORT
    )
    try:
        with run_product(
            run.provider, {**COMPACTING, "observability": {"otlp_endpoint": collector.origin}}
        ) as product:
            for wire in WIRES:
                product.post(f"{wire}, small", PATHS[wire], make_small(wire))
                product.post(f"{wire}, streamed", PATHS[wire], make_small(wire, stream=True))
                product.post(f"{wire}, long", PATHS[wire], make_long(wire), [("x-session-id", f"o-{wire}")])
                product.post(f"{wire}, again", PATHS[wire], make_long(wire), [("x-session-id", f"o-{wire}")])
                product.post(f"{wire}, no json", PATHS[wire], b"{")
                traced = [("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"), ("tracestate", "x=1")]
                product.post(f"{wire}, traced", PATHS[wire], make_small(wire), traced)
                run.provider.answer = lambda _: Reply(500, b'{"error": {"message": "No."}}')
                product.post(f"{wire}, failed", PATHS[wire], make_small(wire))
                run.provider.answer = answer
            product.ask("models", "GET", "/v1/models", KEY)
            parts = product.finish()
            spans = [span for each in collector.received for span in read_spans(each.body)]
            names = Normalizer({})
            spans.sort(key=lambda span: span.pop("start"))
            run.recording.add("spans/requests", {**parts, "spans": names.clean(spans)})
    finally:
        collector.close()


def _read_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_read_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


def _read_attributes(attributes: Any) -> dict[str, Any]:
    return {each.key: _read_value(each.value) for each in attributes}


def read_spans(body: bytes) -> list[dict[str, Any]]:
    """Returns the spans of an export, with all but their times."""
    found = ExportTraceServiceRequest.FromString(body)
    return [
        {
            "start": span.start_time_unix_nano,
            "name": span.name,
            "kind": span.kind,
            "status": [span.status.code, span.status.message],
            "attributes": _read_attributes(span.attributes),
            "events": [[each.name, sorted(_read_attributes(each.attributes))] for each in span.events],
            "links": len(span.links),
            "trace": span.trace_id.hex(),
            "has parent": bool(span.parent_span_id),
            "resource": _read_attributes(group.resource.attributes),
            "scope": scoped.scope.name,
        }
        for group in found.resource_spans
        for scoped in group.scope_spans
        for span in scoped.spans
    ]


# Real conversations


def record_shared(run: Run, folder: Path) -> None:
    """All real conversations, growing, with `anchored` on chat; nothing where the folder has none.

    Only digests of them are kept beside the script: not all licences let their text enter the project.
    """
    files = sorted(folder.glob("conversations/*.jsonl")) + sorted(folder.glob("malformed/*.jsonl"))
    if not files:
        return
    config = {**COMPACTING, "models": {"*": {"window": 16_000}}, "archive": {"tenant_mb": 0}}
    with run_product(run.provider, config) as product:
        for path in files:
            lines = path.read_text(encoding="utf-8").splitlines()
            for number, line in enumerate(lines[: 2 if run.is_quick else None]):
                given = json.loads(line)
                messages = given.get("messages") or []
                asked = [n + 1 for n, each in enumerate(messages) if each.get("role") in {"user", "tool"}]
                stops = sorted(
                    {asked[len(asked) * part // 5 - 1] for part in range(1, 6)} if asked else set()
                )
                responses: dict[str, Any] = {}
                forwarded: dict[str, Any] = {}
                name = f"real/{path.stem}/{number:03}"
                headers = [
                    ("authorization", f"Bearer sk-{path.stem}-{number}"),
                    JSON_TYPE,
                    ("x-session-id", name),
                ]
                clean = product.normalizer()
                for stop in stops:
                    body: dict[str, Any] = {"model": "m", "messages": messages[:stop]}
                    body |= {"tools": given["tools"]} if given.get("tools") else {}
                    data = json.dumps(body).encode()
                    product.ask(
                        str(stop),
                        "POST",
                        PATHS["chat"],
                        headers,
                        data,
                        normalizer=clean,
                        into=(responses, forwarded),
                    )
                run.recording.add(name, {"responses": responses, "forwarded": forwarded})
        run.recording.add("real/process", product.finish())
