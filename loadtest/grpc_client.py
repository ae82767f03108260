"""A thin gRPC client: prepared message bytes through grpc.aio without (de)serialising.

Calls are spread over a few channels, each its own HTTP/2 connection.
"""

import asyncio
import time
from collections.abc import Callable, Container, Sequence
from typing import Final

import grpc

from loadtest.recorder import GRPC, OK, RequestLog, status_name

INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
_SAMPLE_CHARACTERS = 300


class GrpcClient:
    """Life: open, then `send` any number of times, then close. All on one event loop."""

    def __init__(
        self,
        address: str,
        *,
        tls: bool,
        requests: Sequence[bytes],
        metadata: Sequence[tuple[str, str]],
        channels: int,
        connect_timeout_s: float,
        log: RequestLog,
        on_done: Callable[[int, int], None],
    ) -> None:
        """on_done: gets the row and its status, once per `send`, never inside it."""
        options = [
            ("grpc.use_local_subchannel_pool", 1),  # else equal channels share one connection
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
        ]
        credentials = grpc.ssl_channel_credentials() if tls else None
        self._channels = [
            grpc.aio.secure_channel(address, credentials, options)
            if credentials
            else grpc.aio.insecure_channel(address, options)
            for _ in range(channels)
        ]
        self._methods = [channel.unary_unary(INFER, None, None) for channel in self._channels]
        self._metadata = tuple(metadata) or None
        self._connect_timeout_s = connect_timeout_s
        self._requests = requests
        self._log = log
        self._on_done = on_done
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.error_samples: dict[str, str] = {}
        self.start_ns = 0  # of the run; set before the first send
        self.most_connections = channels

    def __repr__(self) -> str:
        return f"<GrpcClient {len(self._channels)} channels, {len(self._tasks)} calls>"

    async def open(self, connections: int) -> None:
        """Connect the channels ahead. A target that is down is no error yet."""
        waits = [asyncio.ensure_future(channel.channel_ready()) for channel in self._channels]
        _, late = await asyncio.wait(waits, timeout=min(2.0, self._connect_timeout_s))
        for wait in late:
            wait.cancel()
        if late:
            await asyncio.wait(late)

    def send(self, row: int) -> None:
        self._tasks[row] = asyncio.ensure_future(self._call(row))

    async def _call(self, row: int) -> None:
        log = self._log
        log.sent[row] = time.monotonic_ns() - self.start_ns
        method = self._methods[row % len(self._methods)]
        try:
            await method(self._requests[log.payload[row]], metadata=self._metadata)
        except grpc.aio.AioRpcError as exc:
            status = GRPC + exc.code().value[0]
            self.error_samples.setdefault(status_name(status), (exc.details() or "")[:_SAMPLE_CHARACTERS])
        else:
            status = OK
        del self._tasks[row]
        self._on_done(row, status)

    def expire(self, rows: Container[int]) -> None:
        """Take back requests that their caller has given up; `on_done` is not called for them."""
        for row in [row for row in self._tasks if row in rows]:
            self._tasks.pop(row).cancel()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        for channel in self._channels:
            await channel.close(None)
