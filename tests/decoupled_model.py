"""A decoupled `model.py` of Triton's Python backend that does what its input says, on Triton and here; and its config.pbtxt.

SCRIPT is words: a number sends it as a part; `!` behind a word, or alone, is the final flag; `error` sends an error; `raise`
raises; `sN` sleeps N ms; `wide` sends a part of 4 KiB; `endless` sends until it is told that it is cancelled; `wait` waits for
that; `twice` counts on in one array; `thread` in front has the rest done on a thread, after `execute` has returned. What it
sees beside that it writes to the file `notes` in its folder.
"""

import json
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # Triton's, or ours

CONFIG = """
max_batch_size: 0
input [{ name: "SCRIPT" data_type: TYPE_STRING dims: [1] }]
output [{ name: "VALUE" data_type: TYPE_INT32 dims: [-1] }]
model_transaction_policy { decoupled: true }
instance_group [{ kind: KIND_CPU count: 2 }]
"""
NOTES = os.path.join(os.path.dirname(__file__), "notes")
_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_TOO_LONG_S = 20


def note(text):  # type: ignore[no-untyped-def]
    with open(NOTES, "a") as file:
        file.write(f"{text}\n")


class TritonPythonModel:
    def initialize(self, args):  # type: ignore[no-untyped-def]
        assert pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.thread = threading.get_ident()

    def execute(self, requests):  # type: ignore[no-untyped-def]
        assert threading.get_ident() == self.thread
        for request in requests:
            words = pb_utils.get_input_tensor_by_name(request, "SCRIPT").as_numpy()[0].decode().split()
            if words == ["1"]:  # what a gateway tries it with
                words = ["1!"]
            if words[:1] == ["thread"]:
                threading.Thread(target=self.play, args=(request, words[1:]), daemon=True).start()
            else:
                self.play(request, words)

    def play(self, request, words):  # type: ignore[no-untyped-def]
        sender = request.get_response_sender()
        for each in words:
            word, flags = (each[:-1], _FINAL) if each.endswith("!") else (each, 0)
            if word == "raise":
                raise RuntimeError("the model raises")
            try:
                self.do(word, flags, request, sender)
            except Exception as exc:
                note(f"{each}: {type(exc).__name__}: {exc}")

    def do(self, word, flags, request, sender):  # type: ignore[no-untyped-def]
        if word == "":
            sender.send(flags=flags)
        elif word == "error":
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("no luck")), flags=flags)
        elif word == "wrong":
            sender.send(part(np.zeros(1, np.int32)), flags=7)
        elif word == "nothing":
            sender.send()
        elif word == "wide":
            sender.send(part(np.zeros(1024, np.int32)), flags=flags)
        elif word == "twice":
            array = np.zeros(1, np.int32)
            for _ in range(2):
                array += 1
                sender.send(part(array))
        elif word == "endless":
            sent = 0
            while not sender.is_cancelled():
                sender.send(part(np.full(1, sent, np.int32)))
                sent += 1
                time.sleep(0.001)
            note(f"endless: {sent}")
        elif word == "wait":
            end = time.monotonic() + _TOO_LONG_S
            while not request.is_cancelled() and time.monotonic() < end:
                time.sleep(0.005)
            note(f"cancelled: {request.is_cancelled()} {sender.is_cancelled()}")
        elif word[0] == "s":
            time.sleep(int(word[1:]) / 1000)
        else:
            sender.send(part(np.full(1, int(word), np.int32)), flags=flags)

    def finalize(self):  # type: ignore[no-untyped-def]
        assert threading.get_ident() == self.thread
        note("finalized")


def part(array):  # type: ignore[no-untyped-def]
    return pb_utils.InferenceResponse([pb_utils.Tensor("VALUE", array)])
