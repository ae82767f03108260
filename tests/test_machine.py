"""How much memory, and how many cores, this process may use: the machine's, or what a cgroup leaves it."""

import asyncio
import os
import resource
from pathlib import Path

import psutil
import pytest

from gateway.config import parse_config
from gateway.ingress import Ingress
from gateway.process.machine import allow_files, cores, memory_bytes, memory_left_bytes


def test_it_is_the_machines_where_nothing_bounds_it(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == pytest.approx(psutil.virtual_memory().total, rel=0.01)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/", "sys/fs/cgroup/memory.max"),
        ("0::/a/b", "sys/fs/cgroup/a/b/memory.max"),
        ("0::/a/b", "sys/fs/cgroup/a/memory.max"),
        ("7:cpu,memory:/a", "sys/fs/cgroup/memory/a/memory.limit_in_bytes"),
        ("7:memory:/a", "sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ],
)
def test_it_is_what_a_cgroup_leaves(tmp_path: Path, line: str, file: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"3:cpu:/x\n{line}\n")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("1048576\n")
    assert memory_bytes(tmp_path) == 1 << 20
    (tmp_path / file).write_text("max\n")
    assert memory_bytes(tmp_path) == memory_bytes(Path("/nowhere"))


@pytest.mark.parametrize(
    ("line", "limit", "usage", "cached"),
    [
        ("0::/a", "sys/fs/cgroup/a/memory.max", "memory.current", "inactive_file"),
        ("7:memory:/a", "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_what_is_left_is_what_neither_the_machine_nor_a_cgroup_has_used(
    tmp_path: Path, line: str, limit: str, usage: str, cached: str
) -> None:
    assert memory_left_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.05)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    3000 kB\n")
    assert memory_left_bytes(tmp_path) == 3000 << 10
    (tmp_path / limit).parent.mkdir(parents=True)
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / limit).with_name(usage).write_text("700000\n")
    assert memory_left_bytes(tmp_path) == 300000
    # Pages of files are dropped where memory is asked for.
    (tmp_path / limit).with_name("memory.stat").write_text(f"anon 1\n{cached} 500000\n")
    assert memory_left_bytes(tmp_path) == 800000


@pytest.mark.parametrize(
    ("line", "files"),
    [
        ("0::/a/b", {"sys/fs/cgroup/a/cpu.max": "150000 100000"}),
        ("7:cpu,cpuacct:/a", {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}),
        ("0::/a", {"sys/fs/cgroup/a/cpu.max": "50000 100000"}),
    ],
)
def test_cores_are_those_that_it_may_run_on_or_what_a_cgroup_grants(tmp_path: Path, line: str, files: dict[str, str]) -> None:
    allowed = cores(tmp_path)
    assert allowed == len(os.sched_getaffinity(0))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cores(tmp_path) == 1
    (tmp_path / next(iter(files))).write_text("max 100000\n" if "cpu.max" in next(iter(files)) else "-1\n")
    assert cores(tmp_path) == allowed


def test_the_soft_limit_of_open_files_is_raised_as_far_as_the_hard_one_lets_us(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda which: held[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: held.append(limit))
    assert [allow_files(wanted) for wanted in (1000, 2000, 20_000)] == [1024, 2000, 4096]
    held.append((1024, resource.RLIM_INFINITY))
    assert allow_files(20_000) == 20_000
    held.append((resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert allow_files(20_000) > 20_000


def test_more_connections_than_files_are_told_of_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted: list[int] = []
    monkeypatch.setattr("gateway.ingress.allow_files", lambda files: wanted.append(files) or 4096)
    models = [{"name": "m", "backends": [{"kind": "synthetic"}]}]

    async def start(connections: int) -> None:
        server = {"http_port": 0, "grpc_port": 0, "limits": {"connections": connections}}
        ingress = Ingress(parse_config({"server": server, "models": models}, source="test"), run_dir=tmp_path)
        try:
            await ingress.start()
        finally:
            await ingress.drain()

    asyncio.run(start(3000))
    assert not caplog.records
    asyncio.run(start(4000))
    assert wanted == [6256, 8256], "each listener may have so many"
    assert "this process may have 4096 files open (ulimit -Hn), too few for server.limits.connections 4000" in caplog.text
