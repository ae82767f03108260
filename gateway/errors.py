"""One tree of errors. The class says whose fault it is; each protocol maps `Code` to its own status in one table.

GatewayError
├── ConfigError              the operator's file
├── RequestError             the client
│   ├── InvalidArgument
│   ├── AlreadyExists        a region of this name
│   ├── NotFound             model, version, region
│   ├── TooLarge
│   ├── Unauthenticated
│   ├── Forbidden
│   ├── Cancelled            the client went away or cancelled
│   ├── Unsupported
│   └── UnsupportedMediaType what the body says that it is, or what is asked for
├── Unavailable              the load or the state of the server: never executed, safe to retry
│   ├── NotReady             the model is not loaded (yet)
│   ├── Overloaded           queue full, or shed because it would be late
│   ├── BackendUnreachable
│   └── Limited              the key has asked as much as it may
├── DeadlineExceeded         too late; may have been executed
├── BackendFailed            the model
├── PlatformRefused          a cloud: rights, quotas, what is there already or is not
└── InternalError            us
"""

import difflib
import enum
import re
from collections.abc import Collection
from itertools import islice
from typing import Final, Self

_LONGEST_TEXT: Final = 4000
_LONGEST_WORDS: Final = 500
_LONGEST_NAME: Final = 128  # in a message
_NAMES_SHOWN: Final = 10
_NAMES_COMPARED: Final = 50  # a millisecond, which other requests wait
_FOLDERS: Final = re.compile(r"(?<![\w./-])/(?:[^\s/'\"<>|:;,()\[\]]+/)+")  # of an absolute path


class Code(enum.Enum):
    """What went wrong, in no protocol's terms."""

    INVALID_ARGUMENT = "invalid_argument"
    ALREADY_EXISTS = "already_exists"
    NOT_FOUND = "not_found"
    NOT_READY = "not_ready"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    LIMITED = "limited"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    BACKEND_FAILED = "backend_failed"
    BACKEND_UNREACHABLE = "backend_unreachable"
    UNSUPPORTED = "unsupported"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    CONFIG = "config"
    INTERNAL = "internal"


class GatewayError(Exception):
    """The root. message: what was wrong, with the value, what was expected, and the key to change.

    Any text can be given, a client's or a model's among it: what is too long for an answer is cut, and what is no Unicode
    text (a lone surrogate) replaced.
    """

    code: Code = Code.INTERNAL

    def __init__(self, message: str) -> None:
        if len(message) > _LONGEST_TEXT:
            message = f"{message[:_LONGEST_TEXT]}… (cut, of {len(message)} characters)"
        if not message.isascii():
            message = message.encode(errors="replace").decode()
        self.args = (message,)  # as the root's own constructor would set it
        self.message = message

    def __str__(self) -> str:
        return self.message

    def without_frames(self) -> Self:
        """The same, to be kept: the frames that it and its causes passed through hold the request, and often this."""
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self

    @property
    def words(self) -> str:
        """What a client is told: of what is not the client's fault, one short line that names no folder of the server."""
        text = without_folders(" ".join(self.message.split()))
        return text if len(text) <= _LONGEST_WORDS else f"{text[:_LONGEST_WORDS]}… (cut: the server's log has all of it)"


def without_folders(text: str) -> str:
    """The text with each absolute path in it cut to its last part."""
    return _FOLDERS.sub("", text) if "/" in text else text


def shortened(name: str) -> str:
    """A name as a message shows it."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


def instead(asked: str, known: Collection[str], what: str) -> str:
    """What exists in place of a name that does not: `; did you mean 'a'? What: 'a', 'b'`, however many there are."""
    close = difflib.get_close_matches(asked, islice(known, _NAMES_COMPARED), n=1) if len(asked) <= _LONGEST_NAME else []
    near = f"did you mean '{shortened(close[0])}'? " if close else ""
    shown = ", ".join(f"'{shortened(name)}'" for name in islice(known, _NAMES_SHOWN))
    more = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
    return f"; {near}{what}: {shown or 'none'}{more}"


class ConfigError(GatewayError):
    code = Code.CONFIG


class RequestError(GatewayError):
    code = Code.INVALID_ARGUMENT

    @property
    def words(self) -> str:
        return self.message


class InvalidArgument(RequestError):
    code = Code.INVALID_ARGUMENT


class AlreadyExists(RequestError):
    code = Code.ALREADY_EXISTS


class NotFound(RequestError):
    code = Code.NOT_FOUND


class TooLarge(RequestError):
    code = Code.TOO_LARGE


class Unauthenticated(RequestError):
    code = Code.UNAUTHENTICATED


class Forbidden(RequestError):
    code = Code.FORBIDDEN


class Cancelled(RequestError):
    code = Code.CANCELLED


class Unsupported(RequestError):
    code = Code.UNSUPPORTED


class UnsupportedMediaType(RequestError):
    code = Code.UNSUPPORTED_MEDIA_TYPE


class Unavailable(GatewayError):
    """Never executed; safe to retry, unless it is told `after_run`. retry_after_s: when a retry is worth it; None: unknown."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        # Not by `super`, which takes longer: under overload nearly every request ends in one of these.
        GatewayError.__init__(self, message)
        self.args = (self.message, retry_after_s)  # so that it survives pickling between Ray processes
        self.retry_after_s = retry_after_s

    @property
    def retry_s(self) -> float:
        """What clients are told: `retry_after_s`, or a second where that is unknown."""
        return 1.0 if self.retry_after_s is None else self.retry_after_s

    def after_run(self) -> Self:
        """What a request gets that has begun to run, which this alone would deny."""
        return type(self)(f"{self.message}; the request may have run", *self.args[1:])


class NotReady(Unavailable):
    """model: name and version, where one of the configuration was asked; empty, where it is not about one."""

    code = Code.NOT_READY

    def __init__(self, message: str, retry_after_s: float | None = None, model: tuple[str, str] = ("", "")) -> None:
        super().__init__(message, retry_after_s)
        self.args = (self.message, retry_after_s, model)
        self.model = model


class Overloaded(Unavailable):
    code = Code.OVERLOADED


class BackendUnreachable(Unavailable):
    code = Code.BACKEND_UNREACHABLE


class Limited(Unavailable):
    code = Code.LIMITED


class DeadlineExceeded(GatewayError):
    code = Code.DEADLINE_EXCEEDED


class InVain(DeadlineExceeded):
    """A part of the request has run, and the rest would be late there: another backend may be in time."""


class BackendFailed(GatewayError):
    code = Code.BACKEND_FAILED


class PlatformRefused(GatewayError):
    """reason: the cloud's own word for it; "" if it was not reached, so that what was asked may have been done or not."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.args = (self.message, reason)  # as Unavailable
        self.reason = reason


class InternalError(GatewayError):
    code = Code.INTERNAL


def shutting_down(*, ran: bool) -> GatewayError:
    """What a request gets that is left at the end of a drain. ran: any of it has begun to run: sent again, it may run twice."""
    said = "the server is shutting down, and had no time left for this"
    return DeadlineExceeded(f"{said}: it may have run") if ran else NotReady(said, retry_after_s=1.0)
