"""A whole search over SageMaker in a process of its own, to be killed: AWS is the process that started it, which it asks by a
socket. `python -m tests.loadtest.sagemaker_process SOCKET FOLDER RUN`
"""

import asyncio
import secrets
import sys
from collections.abc import Mapping
from multiprocessing.connection import Client
from pathlib import Path
from threading import Lock
from typing import Any

from loadtest.lab.launchers.aws.door import Aws, AwsRefused
from loadtest.prices.catalogue import load_catalogue
from tests.loadtest.fake_aws import REGION, FakeAws
from tests.loadtest.test_sagemaker_launcher import Search


class Elsewhere(FakeAws):
    """The same account, in another process."""

    def __init__(self, socket: str) -> None:
        super().__init__()
        self._connection = Client(socket, "AF_UNIX")
        self._one = Lock()

    @property
    def door(self) -> Aws:
        return Aws(REGION, asked=self._elsewhere, pause=self._pause)

    def _elsewhere(self, service: str, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        with self._one:
            self._connection.send((service, operation, dict(parameters)))
            answer: dict[str, Any] | AwsRefused = self._connection.recv()
        if isinstance(answer, AwsRefused):
            raise answer
        return answer


def main() -> None:
    socket, folder, run = sys.argv[1:]
    secrets.token_hex = lambda nbytes=None: run  # so that whoever kills it knows
    search = Search(Elsewhere(socket), load_catalogue(), Path(folder))
    asyncio.run(search.run())


if __name__ == "__main__":
    main()
