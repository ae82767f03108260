"""Long JSON bodies are decoded in a process of their own, one after another.

A JSON parser holds the interpreter until it is done, on whatever thread: 22 MB take 0.5 s, and no other client is answered
meanwhile. So what is longer than `LONG_BYTES` goes to a child, with what the codec knows of the model, and comes back as raw
tensors, or as the error that the codec raised. The bytes are copied by a thread that waits without the interpreter.

The child starts with the first long body and ends after a while without any. One that dies, or takes too long and is killed,
costs the request that it had; the next one starts another.
"""

import asyncio
import contextlib
import functools
import gc
import logging
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from backends.base import words_of
from gateway.child import Child, ChildLost, receive, send, serve
from gateway.errors import GatewayError, InternalError, InvalidArgument, NotFound, NotReady, TooLarge, Unsupported
from gateway.frames import decode_frame, encode_frame, spec_from_plain, spec_to_plain
from gateway.protocols.generate import GenerateCodec
from gateway.protocols.rest import ModelCodec
from gateway.protocols.tensors import Buffer, shape_key
from gateway.shared_memory import SharedMemoryRegions
from gateway.types import InferRequest, OutputRequest

LONG_BYTES: Final = 256 << 10  # of JSON: up to here the worst takes 40 ms, and what is usual 2 (2026-11-22, 2 cores)
_TIMEOUT_S: Final = 60.0
_IDLE_S: Final = 30.0

_ERRORS: Final[dict[str, type[GatewayError]]] = {
    error.__name__: error for error in (InvalidArgument, NotFound, TooLarge, Unsupported, InternalError)
}

log = logging.getLogger(__name__)

Decoded = Callable[[InferRequest | GatewayError], None]


class _Job:
    """One body. done: None once nobody waits for it any more; set and called on the loop."""

    __slots__ = ("arrival_ns", "body", "codec", "done", "header_bytes", "loop")

    def __init__(
        self, codec: ModelCodec | GenerateCodec, body: Buffer, header_bytes: int | None, arrival_ns: int, done: Decoded
    ) -> None:
        self.codec = codec
        self.body = body
        self.header_bytes = header_bytes
        self.arrival_ns = arrival_ns
        self.done: Decoded | None = done
        self.loop = asyncio.get_running_loop()

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self.done = None

    def end(self, outcome: InferRequest | GatewayError) -> None:
        """From the thread."""
        self.body = b""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and who waited with it
            self.loop.call_soon_threadsafe(self._tell, outcome)

    def _tell(self, outcome: InferRequest | GatewayError) -> None:
        if self.done is not None:
            self.done(outcome)


class LongBodies:
    """See the module. Life: made -> decode … -> close. On an event loop's thread."""

    def __init__(self, regions: SharedMemoryRegions, *, timeout_s: float = _TIMEOUT_S, idle_s: float = _IDLE_S) -> None:
        """timeout_s: of the processor, for one body. idle_s: how long the child waits for another."""
        self._regions = regions
        self._timeout_s = timeout_s
        self._idle_s = idle_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._child: Child | None = None

    def decode(
        self,
        codec: ModelCodec | GenerateCodec,
        body: Buffer,
        header_bytes: int | None,
        arrival_ns: int,
        done: Decoded,
    ) -> Callable[[], None]:
        """Have a body decoded as the codec would; `done` gets the request or the error later, on this loop.

        Returns: what to call when nobody waits for it any more; then `done` is not called. Raises: NotReady, once closed.
        """
        job = _Job(codec, body, header_bytes, arrival_ns, done)
        with self._lock:
            if self._closed:
                raise NotReady("the server is shutting down", retry_after_s=1.0)
            self._jobs.put(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="long-bodies", daemon=True)
                self._thread.start()
        return job.give_up

    def close(self) -> None:
        """End the child, and with it what it decodes, for which nobody may wait. From any thread; waits for its end."""
        with self._lock:
            self._closed = True
            thread, child = self._thread, self._child
            self._jobs.put(None)
        if child is not None:
            child.kill()
        if thread is not None:
            thread.join()

    # on the thread

    def _work(self) -> None:
        try:
            while self._work_once():
                pass
        finally:
            self._end_child()

    def _work_once(self) -> bool:
        """Do the next job; False: there is none."""
        try:
            job = self._jobs.get(timeout=self._idle_s)
        except queue.Empty:
            job = None
        if job is None or self._closed:
            with self._lock:
                if not self._jobs.empty() and not self._closed:
                    return True
                self._thread = None
                return False
        if job.done is not None:
            try:
                outcome = self._decode(job)
            except Exception as exc:
                log.exception("a long body could not be decoded")
                outcome = InternalError(f"the request could not be decoded: {words_of(exc)}")
            job.end(outcome)
        return True

    def _decode(self, job: _Job) -> InferRequest | GatewayError:
        codec = job.codec
        about = {
            "codec": "generate" if isinstance(codec, GenerateCodec) else "infer",
            "model": codec.model,
            "version": codec.version,
            "spec": spec_to_plain(codec.spec),
            "json_depth": codec.json_depth,
            "header_bytes": job.header_bytes,
            "arrival_ns": job.arrival_ns,
            "regions": str(self._regions.directory),
            "regions_enabled": self._regions.enabled,
            "timeout_s": self._timeout_s,
        }
        frame = encode_frame({"body": np.frombuffer(job.body, np.uint8)}, about)
        try:
            inputs, answer = decode_frame(self._running_child().ask(frame))
        except (ChildLost, OSError) as exc:
            self._end_child()
            log.error("the process that decodes long bodies was lost with one of %d bytes: it %s", len(job.body), exc)
            return InternalError("the process that decodes long bodies was lost with this one")
        if "error" in answer:
            return _ERRORS[answer["error"]](answer["message"])
        parameters = answer["parameters"]
        return InferRequest(
            codec.model, codec.version, answer["id"], inputs, answer["rows"], job.arrival_ns,
            msgspec.convert(answer["outputs"], tuple[OutputRequest, ...]), parameters, answer["deadline_ns"],
            answer["priority"], shape_key(codec.spec, codec.ragged, inputs, parameters),
        )  # fmt: skip

    def _running_child(self) -> Child:
        """Raises: OSError, ChildLost."""
        if self._child is not None and self._child.ended:
            self._end_child()
        child = self._child or Child("gateway.long_bodies")
        with self._lock:
            self._child = child
            if self._closed:
                raise ChildLost("is not wanted any more")
        return child

    def _end_child(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.close()


# in the child


@functools.cache
def _regions(directory: str, enabled: bool) -> SharedMemoryRegions:
    return SharedMemoryRegions(directory, enabled=enabled)


def _decoded(frame: Buffer) -> Sequence[Buffer]:
    tensors, about = decode_frame(frame)
    spec = spec_from_plain(about["spec"])
    signal.setitimer(signal.ITIMER_PROF, about["timeout_s"])  # which ends this process, also within a parser
    body = memoryview(tensors["body"]).toreadonly()  # type: ignore[arg-type]  # an ndarray is a buffer
    try:
        if about["codec"] == "generate":
            generate = GenerateCodec(about["model"], about["version"], spec, None, about["json_depth"])
            request = generate.decode(body, about["arrival_ns"])
        else:
            infer = ModelCodec(about["model"], about["version"], spec, None, about["json_depth"])
            read_region = _regions(about["regions"], about["regions_enabled"]).read
            request = infer.decode(body, about["header_bytes"], about["arrival_ns"], read_region)
    except GatewayError as exc:
        return encode_frame({}, {"error": type(exc).__name__, "message": exc.message})
    except MemoryError:
        return encode_frame({}, {"error": "TooLarge", "message": "the request takes more memory than there is"})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    extra: dict[str, Any] = {
        "id": request.id, "rows": request.rows, "outputs": request.outputs, "parameters": request.parameters,
        "deadline_ns": request.deadline_ns, "priority": request.priority,
    }  # fmt: skip
    return encode_frame(request.inputs, extra)


def _serve(channel: socket.socket) -> None:
    # Millions of lists come and go here, none of them garbage: looking for some took most of the time.
    gc.freeze()
    gc.disable()
    while True:
        try:
            frame = receive(channel)
        except EOFError:
            return
        send(channel, _decoded(frame))
        del frame
        gc.collect()  # of what errors left: next to nothing


if __name__ == "__main__":
    serve(_serve)
