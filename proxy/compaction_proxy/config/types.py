"""Defines the types of configuration values, such as numbers, durations, addresses and secrets."""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, get_args
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, SecretStr
from pydantic_core import CoreSchema, core_schema

STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True)
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class OnlyValue:
    """Marks a key that is reserved for later versions. In this version, the key accepts only `value`."""

    value: object

    def check_value(self, value: object) -> object:
        """Returns the value if it is the accepted value.

        Raises:
            ValueError: If the value is different.
        """
        if value != self.value:
            raise ValueError(f"this version supports only {json.dumps(self.value)}")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:  # noqa: ANN401 - pydantic's protocol
        """Returns a schema that checks the type of a value first, and then calls `check_value`."""
        return core_schema.no_info_after_validator_function(self.check_value, handler(source))


def _parse_auto_or_false(value: object) -> object:
    """Parses `auto` or `false`, which may be text from the environment. True means `auto`.

    Raises:
        ValueError: If the value is anything else.
    """
    if value is False or value == "false":
        return False
    if value is True or value in ("auto", "true"):
        return "auto"
    raise ValueError("must be auto or false")


def reject_boolean(value: object) -> object:
    """Returns a value unchanged if it is not a boolean.

    Without this check, pydantic would convert `on`, which YAML reads as true, to the number 1.

    Raises:
        ValueError: If the value is a boolean.
    """
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")  # noqa: TRY004 - pydantic collects ValueError
    return value


def parse_duration(duration: str) -> float:
    """Returns the seconds in a `Duration`, such as `30d`, `12h`, `15m` or `90s`."""
    return float(int(duration[:-1]) * UNIT_SECONDS[duration[-1]])


class UrlOrigin(NamedTuple):
    """The origin of a URL. Its text (`str`) has the form `https://api.openai.com:443`."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_origin(url: str) -> UrlOrigin:
    """Returns the origin of a URL, with the host in lower case.

    A missing port becomes the default port of the scheme, or 0 for an unknown scheme. A missing scheme or
    host becomes empty.
    """
    parts = urlsplit(url)
    return UrlOrigin(parts.scheme, parts.hostname or "", parts.port or DEFAULT_PORTS.get(parts.scheme, 0))


def _split_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError("not a URL: the host or the port is invalid") from None
    return parts


def _check_http_url(url: str) -> str:
    """Checks a base URL, and returns it without trailing slashes.

    Raises:
        ValueError: If the URL cannot be a base URL. The message never quotes the URL, because the URL may
            contain a credential.
    """
    parts = _split_url(url)
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ValueError("a URL must start with http:// or https:// and contain a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("put the credential into api_key, not into the URL")
    if parts.query or parts.fragment or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError("a base URL must not contain a query, a fragment or white space")
    return url.rstrip("/")


def check_store_url(url: str) -> str:
    """Checks that the URL of a store has a supported form, and returns the URL unchanged.

    The details of a Redis URL are checked later, when the store is opened.

    Raises:
        ValueError: If the form is not supported. The message never contains the URL, because the URL may
            contain a password.
    """
    if url == "memory://" or (url.startswith("sqlite:///") and len(url) > len("sqlite:///")):
        return url
    if re.fullmatch(r"(rediss?|valkeys?)(\+(cluster|sentinel|unix))?://[^\s#]+", url):
        return url
    raise ValueError("expected sqlite:///PATH, memory://, or a Redis URL such as redis://HOST")


def mask_passwords(text: str) -> str:
    """Replaces passwords of URLs in a text by asterisks: `…://USER:PASSWORD@…` and `password=PASSWORD`."""
    masked = re.sub(r"(?<=://)([^/@:]*:)[^/]*(?=@)", r"\1********", text)
    return re.sub(r"(password=)[^&]+", r"\1********", masked)


def require_pattern(pattern: str, problem: str) -> AfterValidator:
    """Builds a validator that raises `ValueError(problem)` if `pattern` does not match the whole text."""

    def check_text(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(problem)
        return text

    return AfterValidator(check_text)


def _check_key(secret: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[\x21-\x7e]*", secret.get_secret_value()):
        raise ValueError("a key can contain only printable ASCII characters without spaces or line breaks")
    return secret


Key = Annotated[SecretStr, AfterValidator(_check_key)]


def _read_off(value: object) -> object:
    """Returns `off` for False, because YAML reads a bare `off` as false. Returns other values unchanged."""
    return "off" if value is False else value


AutoOrFalse = Annotated[Literal["auto", False], BeforeValidator(_parse_auto_or_false)]
AccessLog = Annotated[Literal["off", "errors", "all"], BeforeValidator(_read_off)]
Number = Annotated[int, BeforeValidator(reject_boolean), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(reject_boolean), Field(ge=1)]
Seconds = Annotated[float, BeforeValidator(reject_boolean), Field(gt=0, allow_inf_nan=False)]
SecondsOrNever = Annotated[float, BeforeValidator(reject_boolean), Field(ge=0, allow_inf_nan=False)]
Percent = Annotated[float, BeforeValidator(reject_boolean), Field(ge=0, le=100, allow_inf_nan=False)]
Duration = Annotated[
    str,
    require_pattern(r"(?!0+[smhd])[0-9]{1,9}[smhd]", "expected a duration such as 90s, 15m, 12h or 30d"),
]
HttpUrl = Annotated[str, AfterValidator(_check_http_url)]
HttpUrlIfAny = Annotated[str, AfterValidator(lambda url: url and _check_http_url(url))]
StoreUrl = Annotated[str, AfterValidator(check_store_url)]
BasePath = Annotated[
    str,
    require_pattern(
        r"(/[A-Za-z0-9._~-]+)*", "a path must start with / and must not end with /, such as /compaction"
    ),
]
Tenant = Annotated[
    str,
    require_pattern(r"credential|none|header:[A-Za-z0-9_-]+", "expected credential, none or header:NAME"),
    AfterValidator(str.lower),
]
HeaderName = Annotated[
    str,
    require_pattern(r"[A-Za-z0-9_-]+", "a header name can contain only letters, digits, - and _"),
    AfterValidator(str.lower),
]


def unwrap_type(annotation: object) -> object:
    """Returns the type inside `Annotated[...]` and `... | None`. A union of several types stays as it is."""
    if hasattr(annotation, "__metadata__"):
        return unwrap_type(get_args(annotation)[0])
    members = [member for member in get_args(annotation) if member is not type(None)]
    if type(None) in get_args(annotation) and len(members) == 1:
        return unwrap_type(members[0])
    return annotation
