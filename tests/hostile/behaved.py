"""A client that behaves. It asks by REST and by gRPC in turn, over one connection each, and writes down how long each took, and
for how much of that it or the gateway was ready to run and others had all cores: the delay of a busy machine.

A process of its own: what attacks costs its own process must not be taken for the gateway's delay.

    python -m tests.hostile.behaved HOST:PORT HOST:PORT PID FILE [AUTHORITY]
"""

import contextlib
import http.client
import json
import os
import ssl
import sys
import time
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

TIMEOUT_S = 60.0
_PAUSE_S = 0.02  # far below the delays that are looked for; without it, asking alone would keep a core busy
_BODY = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()


def waited_s(pid: int) -> float:
    """For how long the first thread of a process has been ready to run and has not run. Source: schedstat, proc(5).

    Of the gateway's threads this one answers; what others do meanwhile must not be an excuse. 0: this kernel does not tell.
    """
    with contextlib.suppress(FileNotFoundError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def main(http_address: str, grpc_address: str, pid: str, path: str, authority: str = "") -> None:
    """pid: the gateway's. authority: the file of who vouches for the server; empty: it speaks no TLS."""
    if authority:
        trusted = ssl.create_default_context(cafile=authority)
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(http_address, timeout=TIMEOUT_S, context=trusted)
        channel = grpc.secure_channel(grpc_address, grpc.ssl_channel_credentials(Path(authority).read_bytes()))
    else:
        connection = http.client.HTTPConnection(http_address, timeout=TIMEOUT_S)
        channel = grpc.insecure_channel(grpc_address)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    message = pb.ModelInferRequest(model_name="wide", raw_input_contents=[bytes(16)])
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])

    def rest() -> None:
        connection.request("POST", "/v2/models/wide/infer", _BODY)
        answer = connection.getresponse()
        told = answer.read()
        assert answer.status == 200, told

    def rpc() -> None:
        stub.ModelInfer(message, timeout=TIMEOUT_S)

    def waited_by_both_s() -> float:
        return waited_s(int(pid)) + waited_s(os.getpid())

    with open(path, "w") as log:
        while True:
            for ask in (rest, rpc):
                before_s, begun_s = waited_by_both_s(), time.monotonic()
                ask()
                took_s = time.monotonic() - begun_s
                log.write(f"{begun_s} {took_s} {min(took_s, waited_by_both_s() - before_s)}\n")
                log.flush()
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
