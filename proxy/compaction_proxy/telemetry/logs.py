"""Configures logging: the log lines of the proxy and of its libraries go to stderr, without credentials.

The proxy logs counts, ids and reasons, but never the text of a conversation's messages.
"""

import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from functools import partial
from typing import Literal, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from compaction_proxy.config.sections import ObservabilitySection
from compaction_proxy.support.fail_open import suppress_and_report

# Id of the current request, which `add_request_id` adds to each log line. The log lines of a compaction have
# the id of the request that started the compaction, even if that request has already ended.
REQUEST_ID: ContextVar[str] = ContextVar("request")

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


def suppress_and_log(event: str) -> suppress_and_report:
    """Returns a context manager that suppresses and logs the exceptions of its block.

    It suppresses the same exceptions as `suppress_and_report`, and logs each as a warning.

    Args:
        event: The name of the log event (`support.log_events`). The field `error` of the log line contains
            the type of the exception.
    """
    return suppress_and_report(partial(_log_suppressed_error, event))


def _log_suppressed_error(event: str, error: BaseException) -> None:
    structlog.get_logger().warning(event, error=type(error).__name__)


def _mask_credentials(value: object, field_name: str = "") -> object:
    """Returns the value with each credential replaced by `MASK`, also in nested dicts and lists.

    If `field_name` is in `CREDENTIAL_KEYS`, returns `MASK`. Converts bytes and objects of unusual types to
    text.
    """
    if field_name.lower().replace("-", "_") in CREDENTIAL_KEYS:
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
    """Replaces the credentials in a log event with `MASK`. Finds them by field names and text patterns."""
    internal = ("_record", "_from_structlog")
    return {key: value if key in internal else _mask_credentials(value, key) for key, value in event.items()}


def add_request_id(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Adds the id of the current request (`REQUEST_ID`) to a log event, if there is one."""
    request = REQUEST_ID.get("")
    return {"request": request, **event} if request else event


def _escape_match(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]


def escape_control_characters(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escapes control characters in texts, so that none reaches a terminal.

    Does not escape the line breaks of a traceback.
    """
    escaped = {}
    for key, value in event.items():
        lines = value.split("\n") if key == "exception" and isinstance(value, str) else [value]
        cleaned = [CONTROL.sub(_escape_match, line) if isinstance(line, str) else line for line in lines]
        escaped[key] = cleaned[0] if len(cleaned) == 1 else "\n".join(cleaned)
    return escaped


def _build_renderers(style: Literal["json", "console"]) -> list[Processor]:
    if style == "json":
        return [structlog.processors.JSONRenderer()]
    plain = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
    )
    return [escape_control_characters, plain]


def configure_logging(style: Literal["json", "console"] = "json", level: int = logging.INFO) -> None:
    """Sends all log lines whose level is at least `level` to stderr, as JSON or as text for a console.

    A second call replaces the earlier configuration.
    """
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
    for library in ("uvicorn", "httpx", "asyncio"):  # below `WARNING`, they log each connection
        logging.getLogger(library).setLevel(max(level, logging.WARNING))


def configure_service_logging(section: ObservabilitySection) -> None:
    """Sends log lines to stderr in the form and from the level that the configuration names."""
    configure_logging(section.log_format, logging.getLevelNamesMapping()[section.log_level.upper()])


def get_logger(name: str) -> FilteringBoundLogger:
    """Returns the logger of the module `name`. Example: `log.info(EVENT, tokens_before=…)`."""
    return cast("FilteringBoundLogger", structlog.stdlib.get_logger(name))
