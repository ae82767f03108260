"""Pages of code are given back only where that can lose nothing, and what needs them again works on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.process.code_pages import unwritten

MAPPING = """{start}-{end} {rights} 00000000 08:01 17                         {path}
Size:                 64 kB
Rss:                  60 kB
Shared_Clean:         60 kB
Shared_Dirty:          {shared} kB
Private_Clean:         0 kB
Private_Dirty:         {private} kB
Anonymous:             {private} kB
VmFlags: rd ex mr mw me sd
"""


def mapping(
    start: int, *, rights: str = "r-xp", path: str = "/lib/a.so", shared: int = 0, private: int = 0, pages: int = 16
) -> list[str]:
    end = start + 4096 * pages
    text = MAPPING.format(start=f"{start:x}", end=f"{end:x}", rights=rights, path=path, shared=shared, private=private)
    return text.splitlines(keepends=True)


def test_only_mappings_of_these_files_that_nobody_writes_to_are_found() -> None:
    base = 0x7F0000000000
    lines = [
        *mapping(base),
        *mapping(base + 0x100000, rights="rw-p"),
        *mapping(base + 0x200000, rights="r--p", path="/lib/with a blank.so"),
        *mapping(base + 0x300000, private=4),  # relocated, and made unwritable then
        *mapping(base + 0x400000, shared=4),
        *mapping(base + 0x500000, path="/lib/other.so"),
        *mapping(base + 0x600000, rights="r-xs"),
        *mapping(base + 0x700000, rights="rwxp"),
        *mapping(base + 0x800000, path="/lib/a.so (deleted)"),
        *mapping(base + 0x900000, rights="r--p"),
    ]
    found = list(unwritten(lines, {"/lib/a.so", "/lib/with a blank.so"}))
    assert found == [(start, start + 0x10000) for start in (base, base + 0x200000, base + 0x900000)]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own")
def test_what_was_given_back_comes_again_and_works_on() -> None:
    code = """
import numpy as np, orjson
from gateway.process.code_pages import give_back, libraries
def file_kb():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssFile"))
before, wanted = file_kb(), np.linalg.inv(np.eye(64) * 3).sum()
stay = libraries()
assert any('openblas' in path for path in stay)
give_back(stay)
after = file_kb()
assert np.linalg.inv(np.eye(64) * 3).sum() == wanted
assert orjson.loads(orjson.dumps({"a": [1.5]})) == {"a": [1.5]}
print(before - after)
"""
    given = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent.parent,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert int(given.stdout) > 1000
