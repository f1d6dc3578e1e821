"""Forms that pages send: read within bounds, as browsers without scripts send them."""

import asyncio
from urllib.parse import parse_qs

from starlette.requests import Request

from proxy.admin.ui.api import Refused

MAX_FORM_BYTES = 65_536
_MAX_FIELDS = 100


async def form(request: Request, limit_bytes: int = MAX_FORM_BYTES) -> dict[str, list[str]]:
    """The fields of a form, `application/x-www-form-urlencoded`.

    Raises:
        Refused: 413, it is larger than the limit; 415, it is none; 400, it cannot be read.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in ("application/x-www-form-urlencoded", ""):
        raise Refused(415, "This takes forms only.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit_bytes:
            raise Refused(413, f"That is more than {limit_bytes:,} bytes.")
    try:
        return await asyncio.to_thread(_fields, bytes(body))
    except ValueError as error:
        raise Refused(400, "The form cannot be read.") from error


def _fields(body: bytes) -> dict[str, list[str]]:
    return parse_qs(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)


def one(fields: dict[str, list[str]], name: str) -> str:
    """A field's first value; empty: there is none."""
    return fields.get(name, [""])[0]
