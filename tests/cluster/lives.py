"""What a gateway on Ray tells of itself, beside what the operating system sees of its replicas."""

import http.client
import os
import re
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


def uptime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def began_s(pid: int) -> float:
    """After the machine's start. Raises: OSError, if the process has ended."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")


class Lives:
    """Of the replicas of one deployment, as the operating system sees them: those that descend from this process.

    Other tests' clusters, which run beside, may have deployments of the same name. late_s: how long the machine has kept this
    process waiting at most, and so may have kept others.
    """

    def __init__(self, deployment: str) -> None:
        self.late_s = 0.0
        self._deployment = deployment
        self._began_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = {}
        self._looking = threading.Lock()
        self._over = threading.Event()
        self._pidfds: dict[int, int] = {}
        self._ends = select.epoll()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._keep_looking, self._see_ends)]

    @contextmanager
    def watched(self) -> Iterator["Lives"]:
        for thread in self._threads:
            thread.start()
        yield self
        self._over.set()
        for thread in self._threads:
            thread.join()
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._ends.close()

    @property
    def alive(self) -> list[int]:
        """Now: none that was alive before this was asked is missing."""
        self._look()
        return sorted(self._began_s.keys() - self._ended_s.keys())

    def all_s(self) -> float:
        """Of all of them together."""
        now_s = uptime_s()
        return sum(self._ended_s.get(pid, now_s) - began for pid, began in list(self._began_s.items()))

    def _keep_looking(self) -> None:
        while not self._over.wait(0.3):
            self._look()

    def _look(self) -> None:
        with self._looking:
            for process in psutil.Process().children(recursive=True):
                with suppress(OSError, psutil.NoSuchProcess):  # it has just ended
                    if process.pid not in self._began_s and self._deployment in " ".join(process.cmdline()):
                        pidfd = os.pidfd_open(process.pid)
                        self._pidfds[pidfd] = process.pid
                        self._began_s[process.pid] = began_s(process.pid)
                        self._ends.register(pidfd, select.EPOLLIN)

    def _see_ends(self) -> None:
        """Apart from looking, which takes so long that ends would be seen late."""
        while not self._over.is_set():
            asked_s = uptime_s()
            ended = self._ends.poll(0.1)
            if not ended:
                self.late_s = max(self.late_s, uptime_s() - asked_s - 0.1)
            for pidfd, _ in ended:
                self._ended_s[self._pidfds[pidfd]] = uptime_s()
                self._ends.unregister(pidfd)


def told(port: int, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
    return sum(float(value) for own, value in found if all(f'{key}="{label}"' in own for key, label in labels.items()))
