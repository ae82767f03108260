"""Keep-alive connections that each send the next request when the last is answered, from a thread of their own."""

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

_ANSWER_WITHIN_S = 30.0


def infer_body(rows: list[list[float]]) -> dict[str, object]:
    """A request of the synthetic model's one input."""
    shape = [len(rows), len(rows[0])]
    return {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": shape, "data": rows}]}


@dataclass
class Load:
    """Life: `with Load(port, model) as load: …`, then read the outcome.

    outcomes: status -> answers; "broken: ..." -> connections that failed, each with one request. slowest_s: of the answers.
    errors: the bodies of those that were none.
    """

    port: int
    model: str
    connections: int = 8
    outcomes: Counter[int | str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    errors: list[bytes] = field(default_factory=list)
    answered_at_s: list[float] = field(default_factory=list)

    def __enter__(self) -> "Load":
        body = json.dumps(infer_body([[float(column) for column in range(16)]])).encode()
        head = f"POST /v2/models/{self.model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(2 * _ANSWER_WITHIN_S)

    def wait_for(self, answers: int, within_s: float = 30.0) -> None:
        """Until so many more requests have been answered."""
        goal = self.outcomes[200] + answers
        deadline = time.monotonic() + within_s
        while self.outcomes[200] < goal:
            assert time.monotonic() < deadline, f"no progress within {within_s} s: {self.outcomes}"
            time.sleep(0.02)

    async def _main(self) -> None:
        await asyncio.gather(*(self._keep_sending() for _ in range(self.connections)))

    async def _keep_sending(self) -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while not self._stopping:
            started_s = time.monotonic()
            try:
                if streams is None:
                    streams = await asyncio.open_connection("127.0.0.1", self.port)
                status, closing = await asyncio.wait_for(self._exchange(*streams), _ANSWER_WITHIN_S)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as exc:
                self.outcomes[f"broken: {type(exc).__name__}"] += 1
                closing = True
                await asyncio.sleep(0.05)
            else:
                now_s = time.monotonic()
                self.outcomes[status] += 1
                self.slowest_s = max(self.slowest_s, now_s - started_s)
                self.answered_at_s.append(now_s)
            if closing and streams is not None:
                streams[1].close()
                streams = None
        if streams is not None:
            streams[1].close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, bool]:
        writer.write(self._request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        status = int(head[9:12])
        if status != 200:
            self.errors.append(body)
        return status, b"connection: close" in head


@dataclass
class GrpcLoad:
    """The same with one blocking tritonclient. outcomes: "ok", or the error."""

    port: int
    model: str
    outcomes: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> "GrpcLoad":
        self._stopping = False
        self._thread = threading.Thread(target=self._keep_sending, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        self._thread.join(_ANSWER_WITHIN_S)

    def _keep_sending(self) -> None:
        tensor = triton.InferInput("INPUT0", [1, 16], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 16), dtype=np.float32))
        client = triton.InferenceServerClient(f"127.0.0.1:{self.port}")
        while not self._stopping:
            try:
                client.infer(self.model, [tensor], client_timeout=_ANSWER_WITHIN_S)
            except InferenceServerException as exc:
                self.outcomes[str(exc)] += 1
                time.sleep(0.05)
            else:
                self.outcomes["ok"] += 1
        client.close()
