"""Parses responses with httptools as their bytes arrive, within size limits."""

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

# The parser refuses a response that exceeds one of the three limits below. This one is the limit bytes in a
# row that may contain no body data. Such bytes are the status line, header fields, chunk extensions and
# trailers.
MAX_FRAMING_BYTES = 262_144
# The most bytes that the name and the value of one header field may have together.
MAX_LINE_BYTES = 65_536
# The most header fields, and the most trailer fields, that a response may have.
MAX_FIELDS = 1_000

SWITCHING_PROTOCOLS = 101


class _RejectedResponseError(Exception):
    """Raised in callbacks of httptools, to stop it at input that this parser refuses."""


class ResponseParser:
    """Parses the responses of one connection, one after the other.

    It drops interim responses (1xx) and trailers.

    Attributes:
        has_head: Whether the status line and all header fields have arrived. The parser sets this attribute
            and the next three at the same time.
        status: The status code as received.
        reason: The reason phrase.
        headers: The header fields in order, with their names in lower case.
        body: The parts of the body that were parsed. The caller of `feed_data` takes them and clears the
            list.
        is_complete: Whether the response is complete.
        is_reusable: Whether the connection may serve another request after the complete response.
    """

    __slots__ = (
        "_bodiless",
        "_fields",
        "_framing_bytes",
        "_interim",
        "_parser",
        "_phrase",
        "body",
        "has_head",
        "headers",
        "is_complete",
        "is_reusable",
        "on_body",
        "reason",
        "status",
    )

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.on_body = self.body.append  # httptools calls `on_body` with each part of the body
        self._parser: HttpResponseParser | None = None
        self.expect_response(is_bodiless=False)

    def expect_response(self, *, is_bodiless: bool) -> None:
        """Resets the state for a new response. `is_bodiless` is true for the response to a HEAD request."""
        self.has_head = self.is_complete = self.is_reusable = False
        self.status = 0
        self.reason = b""
        self._phrase = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self.headers = self._fields
        self._framing_bytes = 0
        self._interim = False
        self._bodiless = is_bodiless

    def feed_data(self, data: memoryview) -> bool:
        """Parses received bytes. Returns False if they are refused.

        Bytes are refused if they are no valid HTTP, exceed a limit, or come after the end of the response.
        What was parsed before the refused bytes stays in the attributes.
        """
        parser = self._parser or self._create_parser()
        self._framing_bytes += len(data)
        try:
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            return False
        if not self.body:
            return self._framing_bytes <= MAX_FRAMING_BYTES
        self._framing_bytes = 0
        if self.is_complete and self._bodiless:  # this response must not have a body
            self.body.clear()
            return False
        return True

    def close(self) -> None:
        """Drops the httptools parser, whose callbacks refer to this object.

        Without this, both objects would keep each other in memory until the garbage collector runs.
        """
        self._parser = None

    def _create_parser(self) -> HttpResponseParser:
        self._parser = parser = HttpResponseParser(self)
        # Common clients accept three deviations from the standard: forbidden characters in field values,
        # lines that end in LF alone, and spaces after a chunk size. So this parser accepts them, too.
        parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        return parser

    def is_delimited_by_close(self) -> bool:
        """Returns whether the body ends only with the connection.

        This is so if the header fields declare neither a length nor chunked transfer coding.
        """
        framing = dict(self.headers)
        coding = framing.get(b"transfer-encoding")
        if coding is not None:
            return coding.lower().rpartition(b",")[2].strip() != b"chunked"
        return self.has_head and b"content-length" not in framing

    def on_message_begin(self) -> None:
        """Refuses a response that begins after the expected one is complete."""
        if self.is_complete:
            raise _RejectedResponseError

    def on_status(self, phrase: bytes) -> None:
        """Adds a part of the reason phrase."""
        self._phrase += phrase

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a header field or a trailer field. Refuses the response if it has too many fields."""
        # httptools accepts white space after some names. A proxy must remove it (RFC 9112 §5.1).
        self._fields.append((name.rstrip().lower(), value))
        if len(self._fields) > MAX_FIELDS:
            raise _RejectedResponseError

    def on_headers_complete(self) -> None:
        """Stores the status and the header fields, unless they belong to an interim response (1xx).

        Refuses the response if one of its header fields is too long.
        """
        assert self._parser is not None  # noqa: S101 - the parser itself makes this call
        fields, self._fields = self._fields, []
        phrase, self._phrase = self._phrase, b""
        if self._framing_bytes > MAX_LINE_BYTES and any(len(k) + len(v) > MAX_LINE_BYTES for k, v in fields):
            raise _RejectedResponseError
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200 and status != SWITCHING_PROTOCOLS
        if not self._interim:
            self.status, self.reason, self.headers, self.has_head = status, phrase, fields, True
            if self._bodiless or status == SWITCHING_PROTOCOLS:
                self._end_after_head()

    def _end_after_head(self) -> None:
        """Ends a response that has no body. Drops the httptools parser, because it would expect a body."""
        self.on_message_complete()
        self.is_reusable = self.is_reusable and self._bodiless
        self._bodiless = True
        self._parser = None

    def on_message_complete(self) -> None:
        """Records that the response is complete, unless it is an interim response (1xx)."""
        if not self._interim and not self.is_complete:
            assert self._parser is not None  # noqa: S101 - the parser itself makes this call
            self.is_complete = True
            self.is_reusable = self._parser.should_keep_alive()
