"""Spans to an OTLP collector.

What has ended is put into a queue, which takes a microsecond and waits for nobody. A thread makes spans of it and sends them,
when there are many or a while has passed: many, as a message costs a millisecond. It computes 2 ms at a time and lets others
run: less than the interpreter's 5 ms, after which they would be let by force. The queue is bounded: what finds no room, because
the collector is slow, hangs or is gone, is dropped and counted. So is what it did not take within the exporter's timeout.
"""

import logging
import threading
import time
from collections import deque
from typing import Final

from gateway.tracing.context import random_bytes
from gateway.tracing.opentelemetry import LOGS, Collector
from gateway.tracing.settings import Settings
from gateway.tracing.spans import number_of
from gateway.tracing.templates import trace_bytes
from gateway.types import BatchTrace, RequestTrace

_AT_ONCE: Final = 1024  # spans that are made before others run
_TOLD_EVERY_S: Final = 60.0

log = logging.getLogger(__name__)


class Exporter:
    """Life: made -> put … -> close. exported, dropped, failed: spans that were taken, found no room, or were not taken."""

    def __init__(self, settings: Settings) -> None:
        """Imports the SDK: some 0.3 s. Raises: ConfigError."""
        self.exported = self.dropped = self.failed = 0
        self._settings = settings
        self._most, self._many = settings.queued_spans, settings.sent_spans
        self._collector = Collector(settings)
        self._queue: deque[tuple[int, RequestTrace | BatchTrace]] = deque()
        self._put = self._taken = 0  # spans; each is counted by one thread alone
        self._sending = 0
        self._due = threading.Event()
        self._ending = False
        self._given_up = False
        self._told_s = -_TOLD_EVERY_S
        self._untold = 0
        self._reason = _Reason()
        self._thread = threading.Thread(target=self._main, name="traces", daemon=True)
        self._thread.start()

    def put(self, trace: RequestTrace | BatchTrace) -> None:
        """Send what is noted in it, some time. Never waits, and never raises. From one thread.

        It is called for one request in a hundred, and finds nothing of its own in a cache: so it touches little.
        """
        size = number_of(trace)
        put = self._put + size
        waiting = put - self._taken
        if waiting > self._most or self._ending:
            self.dropped += size
            return
        self._put = put
        self._queue.append((size, trace))
        if waiting >= self._many > waiting - size:  # once: who sends them goes on until they are few
            self._due.set()

    def spans(self) -> dict[str, int]:
        """How many there were, by what became of them."""
        return {"exported": self.exported, "dropped": self.dropped, "failed": self.failed}

    def close(self, timeout_s: float) -> None:
        """Send what waits, but give it up when the time is over. Blocks as long. A second call does nothing."""
        if self._ending:
            return
        self._ending = True
        self._due.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._given_up = True
            waiting = self._put - self._taken
            self.dropped += waiting
            if waiting + self._sending:
                log.warning("%d spans are given up at the end: the collector has not taken them", waiting + self._sending)
        self._collector.close()  # a call by HTTP is left to its daemon thread

    def _main(self) -> None:
        self._reason.thread = threading.get_ident()
        for name in LOGS:
            logging.getLogger(name).filters.insert(0, self._reason)  # before one of theirs that drops what is said again
        try:
            ending = False
            while not ending:
                self._due.wait(self._settings.delay_s)
                self._due.clear()
                ending = self._ending
                self._send_what_waits(ending)
        finally:
            for name in LOGS:
                logging.getLogger(name).removeFilter(self._reason)

    def _send_what_waits(self, ending: bool) -> None:
        """ending: also what came while a message was sent, however little it is; else it waits for more."""
        while self._queue and not self._given_up:
            try:
                taken = self._collector.send(self._message())
            except Exception as exc:  # whatever it is, the next ones may go well
                self._reason.text = f"{type(exc).__name__}: {exc}"
                taken = False
            sent, self._sending = self._sending, 0
            if taken:
                self.exported += sent
            else:
                self.failed += sent
                self._tell(sent)
            if not ending and self._put - self._taken < self._many:
                return

    def _message(self) -> bytes:
        """The spans of what waits, as many as leave at once."""
        # Once for all: what ends together must not drift apart with the wall clock.
        unix_ns = time.time_ns() - time.monotonic_ns()
        pieces: list[bytes] = []
        most = self._many
        while self._queue and self._sending < most:
            pause_at = min(most, self._sending + _AT_ONCE)
            while self._queue and self._sending < pause_at:
                size, trace = self._queue.popleft()
                self._taken += size
                try:
                    spans, piece = trace_bytes(trace, unix_ns, random_bytes)
                except Exception:
                    self._sending += size  # with the message, which is lost
                    raise
                self._sending += spans
                pieces.append(piece)
            time.sleep(0)
        return b"".join(pieces)

    def _tell(self, spans: int) -> None:
        """Say that a collector does not take spans: at once, then once in a while."""
        self._untold += spans
        now_s = time.monotonic()
        if now_s - self._told_s < _TOLD_EVERY_S or self._given_up:
            return
        self._told_s = now_s
        untold, self._untold = self._untold, 0
        where = self._settings.endpoint or "OTEL_EXPORTER_OTLP_ENDPOINT, or this machine"
        log.warning(
            "%d spans are lost: the collector (tracing.endpoint: %s) has not taken them: %s; %d more found no room",
            untold, where, self._reason.text or "no reason given", self.dropped,
        )  # fmt: skip


class _Reason(logging.Filter):
    """Keeps to itself what the exporter logs on a thread of ours, which would be some lines for each batch. text: the last."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.thread: int | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread:
            return True
        self.text = record.getMessage()
        return False
