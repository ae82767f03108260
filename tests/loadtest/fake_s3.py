"""S3 on loopback for a real boto3 in another process: objects with their tags, and puts that ask for there being none yet."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class FakeS3:
    """objects, tags: by bucket/key."""

    objects: dict[str, bytes] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    url: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment of whoever asks it."""
        keys = {"AWS_ACCESS_KEY_ID": "of", "AWS_SECRET_ACCESS_KEY": "nobody", "AWS_EC2_METADATA_DISABLED": "true"}
        return {"AWS_ENDPOINT_URL_S3": self.url, **keys}


@contextmanager
def fake_s3() -> Iterator[FakeS3]:
    fake, one = FakeS3(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            key = unquote(urlsplit(self.path).path[1:])
            if key not in fake.objects:
                self._refuse(404, "NoSuchKey")
                return
            self._answer(200, fake.objects[key])

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            key = unquote(urlsplit(self.path).path[1:])
            if not (self.headers["Authorization"] or "").startswith("AWS4-HMAC-SHA256"):
                self._refuse(403, "AccessDenied")
                return
            with one:
                if self.headers["If-None-Match"] == "*" and key in fake.objects:
                    self._refuse(412, "PreconditionFailed")
                    return
                fake.objects[key], fake.tags[key] = body, self.headers["x-amz-tagging"] or ""
            self._answer(200, b"")

        def _refuse(self, status: int, code: str) -> None:
            self._answer(status, f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nowhere."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        try:
            yield fake
        finally:
            server.shutdown()
