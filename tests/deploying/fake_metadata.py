"""What a machine on EC2 asks while it sets itself up: the instance metadata service, S3 and Secrets Manager, on loopback.

Every signature is held to botocore's own.
"""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

KEYS = {"AccessKeyId": "AKIDEXAMPLE", "SecretAccessKey": "an example of a secret", "Token": "of/a+session=="}
IMDS_TOKEN = "a token of the metadata service"
ROLE = "gateway-of-a-test"


@dataclass
class FakeAws:
    """objects: of S3, by bucket/key. secrets: by service:name. asked: method and path, in order. refuse: so many of S3's.

    cut: so many answers of S3 or of a secret end in their middle.
    """

    objects: dict[str, bytes]
    secrets: dict[str, str] = field(default_factory=dict)
    refuse: int = 0
    cut: int = 0
    asked: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def variables(self) -> dict[str, str]:
        services = ("S3", "SSM", "SECRETS_MANAGER")
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url} | {f"AWS_ENDPOINT_URL_{name}": self.url for name in services}


def unsigned(handler: BaseHTTPRequestHandler, body: bytes, url: str) -> str:
    """What is wrong with the signature; "": nothing."""
    sent = handler.headers["Authorization"] or ""
    found = re.fullmatch(r"AWS4-HMAC-SHA256 Credential=\S+/(\S+)/(\S+)/(\S+)/aws4_request, SignedHeaders=(\S+), \S+", sent)
    if found is None:
        return f"no signature: {sent}"
    _, region, service, names = found.groups()
    if "x-amz-security-token" not in names:
        return "the session's token is not signed"
    headers = {name: handler.headers[name] for name in names.split(";") if name not in ("host", "x-amz-security-token")}
    request = AWSRequest(handler.command, url + handler.path, headers=headers, data=body)
    request.context["timestamp"] = handler.headers["X-Amz-Date"]
    signer = (S3SigV4Auth if service == "s3" else SigV4Auth)(Credentials(*KEYS.values()), service, region)
    request.headers["X-Amz-Security-Token"] = handler.headers["X-Amz-Security-Token"]
    text = signer.string_to_sign(request, signer.canonical_request(request))
    expected = signer.signature(text, request)
    return "" if sent.endswith(f"Signature={expected}") else f"expected {expected}: {text}"


@contextlib.contextmanager
def fake_aws(objects: dict[str, bytes]) -> Iterator[FakeAws]:
    aws = FakeAws(objects)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _say(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if aws.cut and not self.path.startswith("/latest/"):
                aws.cut -= 1
                body = body[: len(body) // 2]
            self.wfile.write(body)

        def do_PUT(self) -> None:
            assert self.path == "/latest/api/token"
            assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
            self._say(200, IMDS_TOKEN.encode())

        def do_GET(self) -> None:
            aws.asked.append(f"GET {self.path}")
            if self.path.startswith("/latest/"):
                found = {"": ROLE, ROLE: json.dumps(KEYS)}.get(self.path.partition("/security-credentials/")[2])
                allowed = self.headers["X-aws-ec2-metadata-token"] == IMDS_TOKEN  # IMDSv2
                self._say(200 if found and allowed else 401, (found or "").encode())
            elif aws.refuse:
                aws.refuse -= 1
                self._say(403, b"the role is not known here yet")
            elif fault := unsigned(self, b"", aws.url):
                self._say(403, fault.encode())
            else:
                body = aws.objects.get(unquote(self.path[1:]))
                self._say(404 if body is None else 200, body or b"NoSuchKey")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked = json.loads(body)
            aws.asked.append(f"POST {self.headers['X-Amz-Target']}")
            if fault := unsigned(self, body, aws.url):
                self._say(403, fault.encode())
            elif self.headers["X-Amz-Target"] == "AmazonSSM.GetParameter":
                assert asked["WithDecryption"] is True
                self._say(200, json.dumps({"Parameter": {"Value": aws.secrets[f"ssm:{asked['Name']}"]}}).encode())
            else:
                found = aws.secrets[f"secretsmanager:{asked['SecretId']}"]
                self._say(200, json.dumps({"SecretString": found}).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    aws.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield aws
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
