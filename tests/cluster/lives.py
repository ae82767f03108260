"""What a gateway on Ray tells of itself, beside what the operating system sees of its replicas."""

import http.client
import os
import re
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

    Other tests' clusters, which run beside, may have deployments of the same name.
    """

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._began_s: dict[int, float] = {}
        self._ended_s: dict[int, float] = {}
        self._over = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)

    @contextmanager
    def watched(self) -> Iterator["Lives"]:
        self._watching.start()
        yield self
        self._over.set()
        self._watching.join()

    @property
    def alive(self) -> list[int]:
        return sorted(self._began_s.keys() - self._ended_s.keys())

    def all_s(self) -> float:
        """Of all of them together."""
        now_s = uptime_s()
        return sum(self._ended_s.get(pid, now_s) - began for pid, began in list(self._began_s.items()))

    def _watch(self) -> None:
        looked_s = 0.0
        while not self._over.wait(0.005):
            for pid in self.alive:
                if _ended(pid):
                    self._ended_s[pid] = uptime_s()
            if uptime_s() - looked_s > 0.3:
                looked_s = uptime_s()
                for process in psutil.Process().children(recursive=True):
                    with suppress(OSError, psutil.NoSuchProcess):  # it has just ended
                        if process.pid not in self._began_s and self._deployment in " ".join(process.cmdline()):
                            self._began_s[process.pid] = began_s(process.pid)


def _ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def told(port: int, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
    return sum(float(value) for own, value in found if all(f'{key}="{label}"' in own for key, label in labels.items()))
