"""What a process says on standard error, and what the signals mean that come to it."""

import json
import signal
import subprocess
import sys

import pytest

from gateway.process.interrupts import Interrupts

slow = pytest.mark.slow  # said in a process of its own

SAY = """
import logging, sys, time
from gateway.process.console import Speech, set_up, step, words
set_up(Speech({level!r}, {format!r}, {quiet}))
words.info("step")
words.error("fault")
words.error("%s", "two\\nlines \\x1b[31mred\\x9b")
try:
    raise ValueError("odd\\x1b[2J\\n\\ttext")
except ValueError:
    logging.getLogger("gateway.x").exception("a %s", "log line\\x9b")
logging.getLogger("gateway.x").info("more")
"""


def said(*, level: str = "info", format: str = "text", quiet: bool = False) -> list[str]:
    program = SAY.format(level=level, format=format, quiet=quiet)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


@slow
def test_words_are_plain_lines_and_log_lines_say_when_how_bad_and_where() -> None:
    first, second, *foreign, third = (lines := said())[:5]
    assert (first, second) == ("step", "fault")
    assert foreign == ["two", "lines ·[31mred·"]  # nobody's words move the cursor
    rest = lines[5:]
    assert third.endswith(" ERROR gateway.x: a log line·")
    assert rest[0] == "Traceback (most recent call last):"
    assert rest[1].startswith("  File ")
    assert rest[-3:-1] == ["ValueError: odd·[2J", "        text"]
    assert rest[-1].endswith(" INFO gateway.x: more")


LOOP = """
import asyncio, os, sys, uvloop
from gateway.process.console import Speech, set_up
set_up(Speech())
async def main():
    (await asyncio.start_server(print, "127.0.0.1", 0)).close()
    sys.exit(0 if all(os.readlink(f"/proc/self/fd/{number}") == "/dev/null" for number in range(3)) else 1)
uvloop.run(main())
"""


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_standard_files_that_are_closed_are_not_taken_by_sockets() -> None:
    # Else the end of the loop aborts the process.
    closed = subprocess.run(["bash", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, LOOP], timeout=30, check=False)
    assert closed.returncode == 0


@slow
def test_quiet_leaves_out_steps_and_the_level_what_is_less_severe() -> None:
    assert said(level="warning", quiet=True)[0] == "fault"
    assert "more" not in "".join(said(level="warning"))


@slow
def test_in_json_every_line_is_an_object() -> None:
    lines = [json.loads(line) for line in said(format="json")]
    assert [line["message"] for line in lines] == ["step", "fault", "two\nlines \x1b[31mred\x9b", "a log line\x9b", "more"]
    assert lines[3]["level"] == "ERROR"
    assert lines[3]["logger"] == "gateway.x"
    assert lines[3]["exception"].endswith("ValueError: odd\x1b[2J\n\ttext")
    assert all(set(line) >= {"time", "level", "logger", "process", "message"} for line in lines)


def test_the_first_signal_stops_and_a_later_ctrl_c_ends_at_once() -> None:
    interrupts = Interrupts()
    assert interrupts.meaning(signal.SIGINT, 10.0) == "stop"
    assert interrupts.meaning(signal.SIGINT, 10.1) == "nothing"  # the same press, passed on by a wrapper
    assert interrupts.meaning(signal.SIGTERM, 12.0) == "nothing"
    assert interrupts.meaning(signal.SIGINT, 12.0) == "end"


def test_a_supervisor_that_sends_sigterm_twice_hurries_nothing() -> None:
    interrupts = Interrupts()
    assert interrupts.meaning(signal.SIGTERM, 10.0) == "stop"
    assert interrupts.meaning(signal.SIGTERM, 20.0) == "nothing"
