"""Logging: one line per event on stderr, our own and the libraries' alike, without credentials.

Message text never gets here: events carry counts, ids and reasons.
"""

import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Literal, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

# The request that what is logged belongs to; a round that it has begun belongs to it, too.
REQUEST: ContextVar[str] = ContextVar("request")

CREDENTIAL_KEYS = frozenset(
    {
        "admin_key",
        "api_key",
        "apikey",
        "authorization",
        "client_keys",
        "cookie",
        "credential",
        "encryption_keys",
        "password",
        "proxy_authorization",
        "secret",
        "set_cookie",
        "x_api_key",
        "x_goog_api_key",
    }
)
CREDENTIAL_TEXT = re.compile(r"(?i)\b(?:bearer|basic)\s+[^\s\"',]+|\bsk-[a-z0-9_-]{6,}|(?<=://)[^/\s@]+(?=@)")
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
MASK = "[credential]"


def _mask_credentials(value: object, key: str = "") -> object:
    """A value without credentials, whatever it is nested in."""
    if key.lower().replace("-", "_") in CREDENTIAL_KEYS:
        return MASK
    if isinstance(value, str):
        return CREDENTIAL_TEXT.sub(MASK, value)
    if isinstance(value, bytes):
        return CREDENTIAL_TEXT.sub(MASK, value.decode("latin-1"))
    if isinstance(value, Mapping):
        return {str(name): _mask_credentials(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_mask_credentials(inner) for inner in value]
    return value if isinstance(value, int | float | None) else CREDENTIAL_TEXT.sub(MASK, str(value))


def scrub_event(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Take credentials out of an event: by the name of a field, and by what looks like one."""
    internal = ("_record", "_from_structlog")
    return {key: value if key in internal else _mask_credentials(value, key) for key, value in event.items()}


def add_request_id(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Say in which request something happened, where it happened in one."""
    named = REQUEST.get("")
    return {"request": named, **event} if named else event


def _escape_match(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


def escape_control_characters(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Show control characters instead of sending them to a terminal; a traceback keeps its lines."""
    shown = {}
    for key, value in event.items():
        lines = value.split("\n") if key == "exception" and isinstance(value, str) else [value]
        cleaned = [CONTROL.sub(_escape_match, line) if isinstance(line, str) else line for line in lines]
        shown[key] = cleaned[0] if len(cleaned) == 1 else "\n".join(cleaned)
    return shown


def _build_renderers(style: Literal["json", "console"]) -> list[Processor]:
    if style == "json":
        return [structlog.processors.JSONRenderer()]
    plain = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    return [escape_control_characters, plain]


def configure_logging(style: Literal["json", "console"] = "json", level: int = logging.INFO) -> None:
    """Send everything to stderr in one style. Calling it again replaces what was before."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        add_request_id,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        scrub_event,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_build_renderers(style)],
    )
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(level)
    logging.captureWarnings(capture=True)
    quiet_libraries()


def quiet_libraries() -> None:
    """Leave out what libraries say about their own life."""
    for library in ("uvicorn", "httpx", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)


def get_logger(name: str) -> FilteringBoundLogger:
    """The logger of a module; `log.info(EVENT, tokens_before=…)`."""
    return cast("FilteringBoundLogger", structlog.stdlib.get_logger(name))
