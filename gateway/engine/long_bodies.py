"""What takes long to decode is decoded in processes of its own, one body after another.

A parser holds the interpreter until it is done, on whatever thread: 22 MB of JSON take 0.5 s, and no other client is answered
meanwhile. So JSON longer than `LONG_JSON_BYTES`, or of which a codec says so (`ParsesLong`), long CSV, and what is longer than
`LONG_BYTES` in protobuf, goes to a child, with what the codec knows of the model, and comes back as raw tensors, or as the
error that the codec raised. A thread copies the bytes; while it waits for them, the interpreter is free. What takes long in
steps (`TakesLong`) the thread does itself.

There are two children, so that what is long does not wait for what is much longer. Each starts with the first body for it, and
ends after a while without any. One that dies, or takes too long and is killed, costs the request that it had; the next one
starts another.
"""

import asyncio
import contextlib
import functools
import gc
import importlib
import logging
import queue
import resource
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec
import numpy as np

from backends.base import ModelSpec, Tensors, words_of
from gateway.engine.shared_memory import SharedMemoryRegions
from gateway.errors import GatewayError, InternalError, InvalidArgument, NotFound, NotReady, Overloaded, TooLarge, Unsupported
from gateway.process.child import Child, ChildLost, give_way, receive, send, serve
from gateway.protocols.generate import GenerateCodec
from gateway.protocols.invocations import FormCodec
from gateway.protocols.media import Form
from gateway.protocols.rest import RestCodec
from gateway.protocols.tensors import shape_key
from gateway.turns import beside, beside_a_loop
from gateway.types import InferRequest, OutputRequest
from gateway.wire.frames import decode_frame, encode_frame, spec_from_plain, spec_to_plain
from gateway.wire.tensors import Buffer

if TYPE_CHECKING:
    from gateway.config import Ragged

_END_S: Final = 1.0  # waited for a thread that still reads
_TIMEOUT_S: Final = 60.0
_LATE_S: Final = 240.0  # of a child that gets a quarter of a processor, say; or is stopped
_IDLE_S: Final = 300.0  # a child waits for another body
_LONGER_BYTES: Final = 2 << 20  # than what takes a child some tenths of a second at most
# What the child may take: lists of one number each need 40 bytes for each of JSON.
_MEMORY_BYTES: Final = 256 << 20
_MEMORY_PER_BYTE: Final = 64
_NICE: Final = 5  # where processors are scarce, the loop goes first

_ERRORS: Final[dict[str, type[GatewayError]]] = {
    error.__name__: error for error in (InvalidArgument, NotFound, TooLarge, Unsupported, InternalError)
}

log = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")
Decoded = Callable[[InferRequest | GatewayError], None]


class BodyCodec(Protocol):
    """What a codec knows of its model."""

    model: str
    version: str
    spec: ModelSpec
    ragged: "Ragged | None"


class _Job:
    """One body. work: what is done for it on the thread. done: gets the outcome on the loop. Both None once nobody waits."""

    __slots__ = ("done", "loop", "work")

    def __init__(self, work: Callable[["_Decoder"], Any], done: Callable[[Any], None]) -> None:
        self.work: Callable[[_Decoder], Any] | None = work
        self.done: Callable[[Any], None] | None = done
        self.loop = asyncio.get_running_loop()

    def give_up(self) -> None:
        """Nobody waits for it any more; nor is its body kept."""
        self.work = self.done = None

    def end(self, outcome: Any) -> None:
        """From the thread."""
        self.work = None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and who waited with it
            self.loop.call_soon_threadsafe(self._tell, outcome)

    def _tell(self, outcome: Any) -> None:
        if self.done is not None:
            self.done(outcome)


class LongBodies:
    """See the module. Life: made -> infer, generate, message … -> close. On an event loop's thread."""

    def __init__(self, regions: SharedMemoryRegions, *, timeout_s: float = _TIMEOUT_S, late_s: float = _LATE_S) -> None:
        """timeout_s: of the processor, for one body. late_s: by the clock."""
        self._regions = regions
        self._timeout_s = timeout_s
        self._shorter, self._longer, self._beside = (_Decoder(late_s) for _ in range(3))

    def infer(
        self, codec: RestCodec, body: Buffer, header_bytes: int | None, arrival_ns: int, done: Decoded
    ) -> Callable[[], None]:
        """Have a body decoded as the codec would; `done` gets the request or the error later, on this loop.

        Returns: what to call when nobody waits for it any more; then `done` is not called. Raises: NotReady, once closed.
        """
        about = {"json_depth": codec.json_depth, "header_bytes": header_bytes, "arrival_ns": arrival_ns}
        return self._put(codec, body, {"reader": "infer", **about}, done)

    def generate(self, codec: GenerateCodec, body: Buffer, arrival_ns: int, done: Decoded) -> Callable[[], None]:
        """Likewise, for the generate extension."""
        return self._put(codec, body, {"reader": "generate", "json_depth": codec.json_depth, "arrival_ns": arrival_ns}, done)

    def form(
        self, codec: FormCodec, body: Buffer, form: Form, answer: str, arrival_ns: int, done: Decoded
    ) -> Callable[[], None]:
        """Likewise, for other forms than v2. answer: as `FormCodec.decode` takes it."""
        about = {"json_depth": codec.json_depth, "form": form, "answer": answer, "arrival_ns": arrival_ns}
        return self._put(codec, body, {"reader": "form", **about}, done)

    def message(
        self, codec: BodyCodec, data: Buffer, arrival_ns: int, remaining_s: float | None, done: Decoded
    ) -> Callable[[], None]:
        """Likewise, for a ModelInferRequest of gRPC. remaining_s: as `protocols.grpc.GrpcCodec.decode` takes it."""
        return self._put(codec, data, {"reader": "message", "remaining_s": remaining_s, "arrival_ns": arrival_ns}, done)

    def on_thread(
        self, work: Callable[[SharedMemoryRegions], Outcome], done: Callable[[Outcome | GatewayError], None]
    ) -> Callable[[], None]:
        """Likewise, for what takes long in many steps, answers too: it is done here, beside the loop, one after another.

        work: gets the regions, as another thread than the loop's may use them.
        """

        def do(decoder: _Decoder) -> Outcome:
            with self._regions.for_a_thread() as regions, beside_a_loop():
                return work(regions)

        return self._beside.put(_Job(do, done))

    def close(self) -> None:
        """End the children, and with them what they decode, for which nobody may wait. From any thread.

        Waits for their end, which comes at once but for work on a thread.
        """
        for decoder in (self._shorter, self._longer, self._beside):
            decoder.close()

    def _put(self, codec: BodyCodec, body: Buffer, about: dict[str, Any], done: Decoded) -> Callable[[], None]:
        about |= {
            "model": codec.model,
            "version": codec.version,
            "regions": str(self._regions.directory),
            "regions_enabled": self._regions.enabled,
            "timeout_s": self._timeout_s,
        }

        def read(decoder: _Decoder) -> InferRequest:
            about["spec"] = spec_to_plain(codec.spec)
            inputs, answer = decoder.ask({"body": np.frombuffer(body, np.uint8)}, about)
            if "error" in answer:
                raise _ERRORS[answer["error"]](answer["message"])
            parameters = answer["parameters"]
            return InferRequest(
                codec.model, codec.version, answer["id"], inputs, answer["rows"], about["arrival_ns"],
                msgspec.convert(answer["outputs"], tuple[OutputRequest, ...]), parameters=parameters,
                deadline_ns=answer["deadline_ns"], priority=answer["priority"], form=answer["form"],
                shape_key=shape_key(codec.spec, codec.ragged, inputs, parameters),
            )  # fmt: skip

        return (self._longer if len(body) > _LONGER_BYTES else self._shorter).put(_Job(read, done))


class _Decoder:
    """A thread that is there as long as there is work, and the child that it may ask."""

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # under the lock
        self._closed = False
        self._thread: threading.Thread | None = None
        self._child: Child | None = None

    def put(self, job: _Job) -> Callable[[], None]:
        """Returns: what gives the job up. Raises: NotReady, once closed; Overloaded, if no thread can be started."""
        with self._lock:
            if self._closed:
                raise NotReady("the server is shutting down", retry_after_s=1.0)
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="long-bodies", daemon=True)
                try:
                    thread.start()
                except RuntimeError as exc:
                    raise _not_begun(exc) from None
                self._thread = thread
            self._jobs.put(job)
        return job.give_up

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread, child = self._thread, self._child
            self._jobs.put(None)
        if child is not None:
            child.kill()
        if thread is not None:
            thread.join(_END_S)

    # on the thread

    def ask(self, tensors: Tensors, about: Mapping[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        """What the child answers. Raises: ChildLost; Overloaded, if none can be started."""
        if self._child is not None and self._child.hung_up:
            self._end_child()
        try:
            child = self._child or Child("gateway.engine.long_bodies")
            with self._lock:
                self._child = child
                if self._closed:
                    raise ChildLost("is not wanted any more")
            late = threading.Timer(self._late_s, child.kill)
            late.daemon = True
            late.start()
        except (OSError, RuntimeError) as exc:  # no open file or process more, or no thread
            raise _not_begun(exc) from None
        try:
            answer = child.ask(encode_frame(tensors, about))
        finally:
            late.cancel()
        return beside(partial(decode_frame, answer))

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                job = None
            with self._lock:
                if self._closed or (job is None and self._jobs.empty()):
                    self._thread = None
                    child, self._child = self._child, None
                    break
            work = None if job is None else job.work
            if job is not None and work is not None:
                job.end(self._outcome(work))
            del job, work  # and the body that they hold, while this waits
        if child is not None:
            child.close()

    def _outcome(self, work: Callable[["_Decoder"], Any]) -> Any:
        try:
            return work(self)
        except GatewayError as exc:
            return exc.without_frames()  # its frames hold the body
        except ChildLost as exc:
            self._end_child()
            log.error("a long request was lost with the process that decoded it, which %s", exc)
            return InternalError("the process that decodes long requests was lost with this one")
        except Exception as exc:
            log.exception("a long request or answer could not be worked on")
            return InternalError(f"the request could not be worked on: {words_of(exc)}")

    def _end_child(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.close()


def _not_begun(exc: Exception) -> Overloaded:
    return Overloaded(f"what decodes long requests could not be started: {words_of(exc)}", retry_after_s=1.0)


# in the child


@functools.cache
def _regions(directory: str, enabled: bool) -> SharedMemoryRegions:
    return SharedMemoryRegions(directory, enabled=enabled)


def _read(about: Mapping[str, Any], body: memoryview, regions: SharedMemoryRegions) -> InferRequest:
    """Raises: GatewayError."""
    model = about["model"], about["version"], spec_from_plain(about["spec"])
    match about["reader"]:
        case "generate":
            generate = GenerateCodec(*model, None, about["json_depth"])
            return generate.decode(body, about["arrival_ns"])
        case "form":
            codec = FormCodec(*model, None, about["json_depth"])
            return codec.decode(body, Form(*about["form"]), about["answer"], about["arrival_ns"], regions.read)
        case "message":
            grpc = importlib.import_module("gateway.protocols.grpc")  # takes long, and few need it
            request: InferRequest = grpc.GrpcCodec(*model, None).decode(
                grpc.parse(bytes(body)), about["arrival_ns"], about["remaining_s"], regions.read
            )
            return request
    infer = RestCodec(*model, None, about["json_depth"])
    return infer.decode(body, about["header_bytes"], about["arrival_ns"], regions.read)


def _decoded(frame: Buffer) -> Sequence[Buffer]:
    tensors, about = decode_frame(frame)
    body = memoryview(tensors["body"]).toreadonly()  # type: ignore[arg-type]  # an ndarray is a buffer
    signal.setitimer(signal.ITIMER_PROF, about["timeout_s"])  # which ends this process, also within a parser
    try:
        # Closed after each body: until the next one, others may take them back.
        with contextlib.closing(_regions(about["regions"], about["regions_enabled"])) as regions:
            request = _read(about, body, regions)
        extra: dict[str, Any] = {
            "id": request.id, "rows": request.rows, "outputs": request.outputs, "parameters": request.parameters,
            "deadline_ns": request.deadline_ns, "priority": request.priority, "form": request.form,
        }  # fmt: skip
        return encode_frame(request.inputs, extra)
    except GatewayError as exc:
        return encode_frame({}, {"error": type(exc).__name__, "message": exc.message})
    except MemoryError:
        return encode_frame({}, {"error": "TooLarge", "message": f"{len(body)} bytes of request take too much memory to read"})
    except Exception as exc:  # else whoever sends its like again would end one child after another
        log.exception("a long request could not be read")
        return encode_frame({}, {"error": "InternalError", "message": f"the request could not be read: {words_of(exc)}"})
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _serve(channel: socket.socket) -> None:
    # Millions of lists come and go here, none of them garbage: looking for some took most of the time.
    gc.freeze()
    gc.disable()
    give_way(_NICE)
    while True:
        try:
            frame = receive(channel)
        except EOFError:
            return
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = _MEMORY_BYTES + _MEMORY_PER_BYTE * len(frame)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        send(channel, _decoded(frame))
        del frame
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        gc.collect()  # of what errors left: next to nothing


if __name__ == "__main__":
    serve(_serve)
