import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Generator
from typing import Any

import pytest
import uvloop
from hypothesis import settings

from tests.file_scheduling import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

# No test reads the prices that the user of this machine has fetched, nor leaves any.
if "PYTEST_XDIST_WORKER" not in os.environ:  # one of which has it from the process that started it
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# Of this process and of the Ray processes that it starts; read when ray is imported, as whoever is collected first may do.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
# A node looks for itself in the cluster for 30 s, and once a first request was lost, as happens on a busy machine, again.
os.environ.setdefault("RAY_gcs_server_request_timeout_seconds", "20")  # by itself 60

settings.register_profile("ours", deadline=None)  # on a busy machine any example may take long
settings.load_profile("ours")

# What a shell in the background, or nohup, ignores is ignored by the processes that tests start as well, and signal.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

_uvloop_close = uvloop.Loop.close
_closing = threading.Lock()  # `catch_warnings` is of the process


def _close(loop: uvloop.Loop) -> None:
    """Close a loop, then warn of what was left open on it.

    uvloop warns first. Where warnings are errors it then leaves the socket open and waits until it is closed: for ever, and why
    the test had left it open is never told.
    """
    with _closing, warnings.catch_warnings(record=True) as left:
        warnings.simplefilter("always", ResourceWarning)
        _uvloop_close(loop)
    for each in left:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


uvloop.Loop.close = _close  # type: ignore[method-assign]  # of all loops that tests make

# Debian package -> the program of it that tests run.
_PROGRAMS = {
    "curl": "curl",
    "chromium-driver": "chromedriver",
    "nodejs": "node",
    "nghttp2-client": "h2load",
    "prometheus": "promtool",
    "cloud-init": "cloud-init",
    "systemd": "systemd-analyze",
}

_status = pytest.StashKey[int]()
_lost = pytest.StashKey[int]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for package in (package for marker in item.iter_markers("debian") for package in marker.args):
        if shutil.which(_PROGRAMS[package]) is None:
            pytest.skip(f"needs the Debian package {package}: apt-get install {package}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave what is imported out of the search for garbage, for good: to go through it takes up to a second.

    Each run of the load generator in this process would: it leaves out what there is, and takes everything in again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.freeze = gc.unfreeze = lambda: None
        gc.enable()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_testnodedown(node: Any, error: object | None) -> None:
    node.config.stash[_lost] = node.config.stash.get(_lost, 0) + (error is not None)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # What a process that was lost, and not replaced, had not run has not failed: to run again what has failed is not enough.
    replaced = int(session.config.getoption("maxworkerrestart", None) or 0)
    left_out = session.config.stash.get(_lost, 0) > replaced
    session.config.stash[_status] = int(pytest.ExitCode.INTERRUPTED if left_out else exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End without tearing the interpreter down.

    Threads of the native libraries under test run on meanwhile; that has ended in a segmentation fault after all had passed.
    """
    if _status not in config.stash or hasattr(config, "workerinput"):
        return  # a usage error: no session began. Or one of several processes, whose end changes nothing
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash[_status])
