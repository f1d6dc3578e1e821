"""Answers taken apart: httptools over the bytes that have just come, within bounds."""

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

# Bytes without any of a body: a head, an extension of a chunk, trailers. Its lines and fields besides.
FRAMING_BYTES = 262_144
LINE_BYTES = 65_536
FIELDS = 1_000

SWITCHING_PROTOCOLS = 101


class _RejectedResponseError(Exception):
    """Stops the parser: what it has found is not wanted."""


class ResponseParser:
    """The answers that come over one connection, one after the other.

    Answers before the final one (1xx) are left out, and so are trailers.

    Attributes:
        headed: Whether the head has come, and with it:
        status: As it came.
        reason: The phrase behind it.
        headers: Fields in their order.
        body: What was found of the body; who takes it clears the list.
        whole: Whether the answer has come to its end.
        reusable: Then, whether the connection may serve again.
    """

    __slots__ = (
        "_bodiless",
        "_fields",
        "_framing_bytes",
        "_interim",
        "_parser",
        "_phrase",
        "body",
        "headed",
        "headers",
        "on_body",
        "reason",
        "reusable",
        "status",
        "whole",
    )

    def __init__(self) -> None:
        self.body: list[bytes] = []
        self.on_body = self.body.append  # the parser's call for each piece
        self._parser: HttpResponseParser | None = None
        self.expect_response(bodiless=False)

    def expect_response(self, *, bodiless: bool) -> None:
        """Expect the answer to a new request; `bodiless` to HEAD."""
        self.headed = self.whole = self.reusable = False
        self.status = 0
        self.reason = b""
        self._phrase = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self.headers = self._fields
        self._framing_bytes = 0
        self._interim = False
        self._bodiless = bodiless

    def feed_data(self, data: memoryview) -> bool:
        """Take apart what has come. False if it is no HTTP, or out of bounds, or not all of the answer's.

        What was found before that stays found.
        """
        parser = self._parser or self._create_parser()
        self._framing_bytes += len(data)
        try:
            parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            return False
        if not self.body:
            return self._framing_bytes <= FRAMING_BYTES
        self._framing_bytes = 0
        if self.whole and self._bodiless:  # after an answer without a body there is no more
            self.body.clear()
            return False
        return True

    def close(self) -> None:
        """Nothing more comes. Parser and callbacks hold each other, and nobody else would part them soon."""
        self._parser = None

    def _create_parser(self) -> HttpResponseParser:
        self._parser = parser = HttpResponseParser(self)
        # What common clients forgive, so do we: odd bytes in values, lines that end in LF.
        parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )
        return parser

    def is_delimited_by_close(self) -> bool:
        """Whether the body is as long as the connection lasts: nothing in the head says where it ends."""
        framing = {name.lower(): value.lower() for name, value in self.headers}
        coding = framing.get(b"transfer-encoding")
        if coding is not None:
            return coding.rpartition(b",")[2].strip() != b"chunked"
        return self.headed and b"content-length" not in framing

    def on_message_begin(self) -> None:
        """An answer begins; there may be one only."""
        if self.whole:
            raise _RejectedResponseError

    def on_status(self, phrase: bytes) -> None:
        """A part of the reason phrase has come."""
        self._phrase += phrase

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field has come, of the head or of trailers."""
        self._fields.append((name.rstrip(), value))  # `name :`, which no one may hand on (RFC 9112 §5.1)
        if len(self._fields) > FIELDS:
            raise _RejectedResponseError

    def on_headers_complete(self) -> None:
        """The head has come."""
        assert self._parser is not None  # noqa: S101 - it is the one who calls
        fields, self._fields = self._fields, []
        phrase, self._phrase = self._phrase, b""
        if self._framing_bytes > LINE_BYTES and any(len(k) + len(v) > LINE_BYTES for k, v in fields):
            raise _RejectedResponseError
        status = self._parser.get_status_code()
        self._interim = 100 <= status < 200 and status != SWITCHING_PROTOCOLS
        if not self._interim:
            self.status, self.reason, self.headers, self.headed = status, phrase, fields, True
            if self._bodiless or status == SWITCHING_PROTOCOLS:
                self._end_after_head()

    def _end_after_head(self) -> None:
        """There is no body, which the parser cannot be told: it is replaced."""
        self.on_message_complete()
        self.reusable = self.reusable and self._bodiless
        self._bodiless = True
        self._parser = None

    def on_message_complete(self) -> None:
        """An answer has come to its end."""
        if not self._interim and not self.whole:
            assert self._parser is not None  # noqa: S101 - it is the one who calls
            self.whole = True
            self.reusable = self._parser.should_keep_alive()
