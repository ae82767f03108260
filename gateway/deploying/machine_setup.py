"""Makes a machine on EC2 a gateway: fetches what is to run, installs it, starts the service. Runs there as root, once.

    machine_setup.py SETTINGS.json

Python's own library is all that the machine has by then. The bucket and the secrets are asked with the role of the instance:
its keys come from the instance metadata service (IMDSv2), and sign the requests (AWS Signature Version 4). Each file is held to
its SHA-256. At last it says `gateway-setup: ready` or `gateway-setup: failed: WHY` to the instance's console.
"""

import base64
import hashlib
import hmac
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit
from urllib.request import Request, urlopen

TRIES: Final = 6  # a new role may take a minute to be known everywhere
WAIT_S: Final = 10.0
TIMEOUT_S: Final = 60.0


def metadata(path: str, token: str) -> str:
    """What the instance metadata service says. token: "" to get one. AWS's own tools read these variables too."""
    where = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    headers = {"X-aws-ec2-metadata-token": token} if token else {"X-aws-ec2-metadata-token-ttl-seconds": "300"}
    with urlopen(
        Request(f"{where}/latest/{path}", None, headers, method="GET" if token else "PUT"), timeout=TIMEOUT_S
    ) as answer:
        return str(answer.read().decode())


def asked(service: str, region: str, path: str, headers: Mapping[str, str], body: bytes) -> HTTPResponse:
    """A request, signed. service: as AWS_ENDPOINT_URL_... calls it, in small letters. body: b"" to get."""
    token = metadata("api/token", "")
    role = metadata("meta-data/iam/security-credentials/", token).split()[0]
    keys = json.loads(metadata(f"meta-data/iam/security-credentials/{role}", token))
    name = service.replace("_", "")
    url = os.environ.get(f"AWS_ENDPOINT_URL_{service.upper()}", "").rstrip("/")
    url = url or f"https://{name}.{region}.{metadata('meta-data/services/domain', token)}"
    at, method, content = (
        time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
        "POST" if body else "GET",
        hashlib.sha256(body).hexdigest(),
    )
    own = {**headers, "host": urlsplit(url).netloc, "x-amz-content-sha256": content, "x-amz-date": at}
    own["x-amz-security-token"] = keys["Token"]
    names = ";".join(sorted(own))
    told = "".join(f"{key}:{own[key]}\n" for key in sorted(own))
    request = hashlib.sha256("\n".join((method, path, "", told, names, content)).encode()).hexdigest()
    scope = f"{at[:8]}/{region}/{name}/aws4_request"
    key = f"AWS4{keys['SecretAccessKey']}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{request}"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signed = f"AWS4-HMAC-SHA256 Credential={keys['AccessKeyId']}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    found: HTTPResponse = urlopen(Request(url + path, body or None, own | {"authorization": signed}), timeout=TIMEOUT_S)
    return found


def patiently(what: str, ask: Callable[[], Any]) -> Any:
    """Again where that may help. Raises: SystemExit, with what was said at last."""
    reason = ""
    for tried in range(TRIES):
        time.sleep(WAIT_S if tried else 0)
        try:
            try:
                return ask()
            except HTTPError as exc:
                reason = f"{exc.code} {exc.read(300).decode(errors='replace')}"
        except (OSError, HTTPException, ValueError, KeyError, IndexError) as exc:  # ValueError: of JSON that is none
            reason = f"{type(exc).__name__}: {exc}"
        print(f"{what}: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(f"{what}: {reason}")


def fetch(bucket: str, key: str, sha256: str, path: str, region: str) -> None:
    """A file of the bucket."""

    def get() -> str:
        found = hashlib.sha256()
        place = f"/{bucket}/{quote(key, safe='/~')}"  # by path: a bucket's name with a dot is in no certificate
        with asked("s3", region, place, {}, b"") as answer, open(path, "wb") as file:
            while part := answer.read(1 << 20):
                found.update(part)
                file.write(part)
            if answer.length:  # of which read(n) tells nothing
                raise ConnectionError(f"it ended {answer.length} bytes early")
        return found.hexdigest()

    if (found := patiently(f"s3://{bucket}/{key}", get)) != sha256:
        raise SystemExit(f"s3://{bucket}/{key}: SHA-256 {found}: expected {sha256}")


def secret(source: str, region: str) -> bytes:
    """What is kept there. source: secretsmanager:NAME or ssm:NAME."""
    kind, _, name = source.partition(":")
    if kind == "ssm":
        service, target, question = "ssm", "AmazonSSM.GetParameter", {"Name": name, "WithDecryption": True}
    else:
        service, target, question = "secrets_manager", "secretsmanager.GetSecretValue", {"SecretId": name}
    headers = {"content-type": "application/x-amz-json-1.1", "x-amz-target": target}

    def get() -> Any:
        with asked(service, region, "/", headers, json.dumps(question).encode()) as answer:
            return json.load(answer)

    found = patiently(source, get)
    text = found["Parameter"]["Value"] if kind == "ssm" else found.get("SecretString")
    return base64.b64decode(found["SecretBinary"]) if text is None else str(text).encode()


def run(*command: str) -> str:
    try:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as exc:
        raise SystemExit(f"{' '.join(command)}: {exc}") from exc


def install(settings: Mapping[str, Any]) -> None:
    """Into an environment of its own: what the locks name by its hash, and the wheel. Nothing else comes in."""
    home = settings["home"]
    python = f"{home}/environment/bin/python"
    run(settings["python"], "-m", "venv", f"{home}/environment")
    if settings["beside"]:  # libraries that the machine's image brings: what the lock names goes before them
        place = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        with open(f"{place}/beside.pth", "w") as file:
            print(settings["beside"], file=file)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "install", "--no-deps")
    for lock in settings["locks"]:  # one by one, as two may name the same
        run(*pip, "--only-binary", ":all:", "--require-hashes", "--requirement", f"{home}/{lock}")
    run(*pip, "--no-index", f"{home}/{settings['wheel']}")


def main(settings: Mapping[str, Any]) -> None:
    """See the module. Raises: SystemExit, with the reason."""
    home, region = settings["home"], settings["region"]
    os.makedirs(home, exist_ok=True)
    for file in settings["files"]:
        fetch(settings["bucket"], file["key"], file["sha256"], f"{home}/{file['name']}", region)
    install(settings)
    if settings["package"]:
        with tarfile.open(f"{home}/{settings['package']}") as archive:
            # Its sum was looked at; Python before 3.11.4 knows no filters.
            if hasattr(tarfile, "data_filter"):
                archive.extractall(f"{home}/model", filter="data")
            else:
                archive.extractall(f"{home}/model")
    os.makedirs(settings["secrets_in"], mode=0o700, exist_ok=True)
    for name, source in settings["secrets"].items():
        value = secret(source, region)
        with open(f"{settings['secrets_in']}/{name}", "wb", opener=lambda path, flags: os.open(path, flags, 0o400)) as opened:
            opened.write(value)
    if settings["unit"]:
        run("systemctl", "daemon-reload")
        run("systemctl", "enable", "--now", settings["unit"])  # returns when the gateway is ready


if __name__ == "__main__":
    try:
        with open(sys.argv[1]) as told:
            main(json.load(told))
    except BaseException as exc:
        print(f"gateway-setup: failed: {exc}", flush=True)
        raise
    print("gateway-setup: ready", flush=True)
