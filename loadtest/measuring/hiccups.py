"""The hiccup meter: a small process beside a run that records who had the cores, and how late whoever asked for one was woken.

    python -I -S hiccups.py FD   standard input: one line of JSON (`_Watch`), then kept open; its end is the meter's end
                                 standard output: "ready", when it records · FD: the recording, which anybody may read meanwhile

Standard library only, and run by its path: it starts in a few hundredths of a second, and its interpreter shares neither lock
nor event loop with the generator, whose stalls it would else call its own.

One child per watched core is pinned to it and asks to be woken each few milliseconds (as jHiccup does), with the ordinary
priority, so that what delays a server delays it. The meter itself adds up each `_PERIOD_S` the CPU time of every process: the
kernel's per-process clocks count nanoseconds, where /proc/stat counts ticks of 10 ms that are sampled. Of the candidate's and
the generator's threads it also takes the time for which they were ready to run and had to wait (/proc/PID/task/TID/schedstat).

Lines of the recording, times in ns of the machine's monotonic clock, everything since the line before of its kind:

    N pid name                              a process that is named below for the first time
    S now candidate_cpu wait longest generator_cpu wait longest meter_cpu [pid:cpu:core ...]
                                            wait: of all its threads, longest: of one of them, told when he got his core; the
                                            rest: CPU time of others, and the core they were last on (-1: any)
    T now core:ticks ...                    steal, in ticks of 1/USER_HZ s
    H core due woke                         somebody who asked for `core` at `due` got it at `woke`

A wait of -1 says that this kernel does not tell it.
"""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

_PERIOD_S: Final = 0.01  # twice that while nothing happens
_MOST_COST: Final = 0.02  # of a core, for the meter itself: where there are very many processes it looks less often
_WAKE_NS: Final = 8_000_000  # how often a core is asked for, if two cores are watched; more cores, less often each
_LATE_NS: Final = 1_000_000
_TRIES: Final = 3  # for one sample
_MOST_CORES: Final = 16
_MOST_THREADS: Final = 500
_MOST_BEGUN: Final = 1000  # processes and threads between two samples: then all are listed
_TURNS: Final = 10
_STILL_NS: Final = 20_000  # no more than that between two looks is standing still
_STILL_LOOKS: Final = 100
_LONGEST_S: Final = 0.05
_LIST_EVERY_S: Final = 0.5  # who began without being noticed by his number, new threads
_STEAL_EVERY_S: Final = 0.05
_HOT_NS: Final = 50_000  # of CPU time in one period: then it has a name

CANDIDATE, GENERATOR, METER, OTHER = range(4)


class _Stat:
    """What /proc/PID/stat (or of a thread) says. Raises: OSError, once it has gone."""

    def __init__(self, path: str) -> None:
        with open(path, "rb", buffering=0) as file:
            text = file.read(1024)
        end = text.rindex(b")")  # the name may hold anything, also parentheses
        self.name = text[text.index(b"(") + 1 : end].decode(errors="replace")
        fields = text[end + 2 :].split()
        self.parent, self.session, self.threads, self.core = int(fields[1]), int(fields[3]), int(fields[17]), int(fields[36])


def _command(pid: int) -> bytes:
    """Its command line. Raises: OSError, once it has gone."""
    with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
        return file.read(4096)


def _clock(pid: int) -> int:
    """The clock of a process's CPU time (clock_getcpuclockid(3), on Linux)."""
    return ~pid << 3 | 2


def _thread_clock(tid: int) -> int:
    return ~tid << 3 | 6


class _Counters:
    """Counters that only grow, most of which stand still: those are looked at in turn, the others each time.

    What one look costs is mostly that of memory that nobody has touched since the last.
    """

    def __init__(self, read: Callable[[int], int]) -> None:
        """read: the counter of a key. Raises: OSError, once it has gone."""
        self._read = read
        self._last: dict[int, int] = {}
        self._moving: dict[int, int] = {}  # key -> the look at which it moved last
        self._still: deque[int] = deque()
        self._gone: list[int] = []
        self._looks = 0

    def add(self, key: int, value: int, *, new: bool) -> None:
        """Follow a counter from that value on. new: it has just begun, and so will move."""
        self._last[key] = value
        if new:
            self._moving[key] = self._looks
        else:
            self._still.append(key)

    def look(self, *, everywhere: bool) -> list[tuple[int, int]]:
        """What has grown, by how much since it was last looked at. What was in its turn has gone where it cannot be read."""
        self._looks += 1
        turn = len(self._still) if everywhere else -(-len(self._still) // _TURNS)
        keys = [*self._moving, *(self._still[number] for number in range(turn))]
        self._still.rotate(-turn)
        grown: list[tuple[int, int]] = []
        gone: list[int] = []
        for key in keys:
            try:
                value = self._read(key)
            except OSError:
                gone.append(key)
                continue
            if by := value - self._last[key]:
                self._last[key] = value
                grown.append((key, max(0, by)))  # less than before: the number is another's by now
                if by > _STILL_NS and key not in self._moving:
                    self._still.remove(key)
                if by > _STILL_NS:
                    self._moving[key] = self._looks
        for key in gone:
            del self._last[key]
            if self._moving.pop(key, None) is None:
                self._still.remove(key)
        if self._looks % _TURNS == 0:
            for key in [key for key, moved in self._moving.items() if self._looks - moved > _STILL_LOOKS]:
                del self._moving[key]
                self._still.append(key)
        self._gone += gone
        return grown

    def gone(self) -> list[int]:
        """What has gone since this was last asked."""
        gone, self._gone = self._gone, []
        return gone


class _Waits:
    """Time for which the threads of some processes were ready and had to wait."""

    def __init__(self, *, all_threads: bool) -> None:
        """all_threads: else only the first of each process."""
        self._all_threads = all_threads
        self._files: dict[int, int] = {}
        self._counters = _Counters(lambda tid: _waited(self._files[tid]))
        self.known = os.path.exists("/proc/self/schedstat")
        self._first = True

    def follow(self, pids: list[int]) -> None:
        """Take note of the threads that there are now."""
        if not self.known:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                tids = map(int, os.listdir(f"/proc/{pid}/task")) if self._all_threads else (pid,)
                for tid in tids:
                    if tid not in self._files and len(self._files) < _MOST_THREADS:
                        file = self._files[tid] = os.open(f"/proc/{pid}/task/{tid}/schedstat", os.O_RDONLY)
                        # Whoever was there before the recording has waited before; who came since has not.
                        self._counters.add(tid, _waited(file) if self._first else 0, new=not self._first)
        self._first = False

    def since(self, *, everywhere: bool) -> tuple[int, int]:
        """ns since the last call, of all threads and the most of one; 0 if this kernel does not tell."""
        grown = self._counters.look(everywhere=everywhere)
        for tid in self._counters.gone():
            os.close(self._files.pop(tid))
        return sum(by for _, by in grown), max((by for _, by in grown), default=0)


def _waited(file: int) -> int:
    fields = os.pread(file, 96, 0).split()
    if len(fields) < 2:
        raise ProcessLookupError
    return int(fields[1])


class _Meter:
    def __init__(self, watch: dict[str, list[int]], children: list[int], record: int) -> None:
        self._record = record
        self._generator = watch["generator"][0]
        self._command = _command(self._generator)
        self._roots = set(watch["candidate"])
        self._meters = {os.getpid(), *children}
        self._role: dict[int, int] = {}
        self._spent = _Counters(lambda pid: time.clock_gettime_ns(_clock(pid)))
        self._threads: dict[int, dict[int, int]] = {}  # of others with several threads: CPU time of each
        self._named: set[int] = set()
        self._newest = 0
        self._loadavg = os.open("/proc/loadavg", os.O_RDONLY)
        self._stat = os.open("/proc/stat", os.O_RDONLY)
        self._steal = self._steal_ticks()
        # The generator sends from the main thread of each of its processes; others of them may wait.
        self._waits = _Waits(all_threads=True), _Waits(all_threads=False)
        self._due = time.monotonic_ns()
        self._list(new=False)
        self._steal_at = self._listed

    def _list(self, *, new: bool) -> None:
        """Take note of all processes that there are."""
        self._newest = self._newest_pid()
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in self._role:
                self._meet(int(name), new=new)
        self._follow()
        self._listed = time.monotonic()

    def _follow(self) -> None:
        for role, waits in zip((CANDIDATE, GENERATOR), self._waits, strict=True):
            waits.follow([pid for pid, its in self._role.items() if its == role])

    def _newest_pid(self) -> int:
        return int(os.pread(self._loadavg, 96, 0).split()[-1])

    def _meet(self, pid: int, *, new: bool) -> bool:
        """Take a process into account. new: all its CPU time is of this run."""
        if pid in self._role:
            return False
        try:
            spent = time.clock_gettime_ns(_clock(pid))  # fails for a thread's number
            self._role[pid] = self._role_of(pid, _Stat(f"/proc/{pid}/stat"))
        except (OSError, ValueError, IndexError):
            return False
        self._spent.add(pid, 0 if new else spent, new=new)
        return True

    def _role_of(self, pid: int, stat: _Stat) -> int:
        if pid in self._meters:
            return METER
        if pid == self._generator:
            return GENERATOR
        if pid in self._roots or stat.session in self._roots:
            return CANDIDATE
        if stat.parent == self._generator:
            command = _command(pid)
            if b"hiccups.py" in command or b"loadtest.measuring.looks" in command:
                return METER  # both give way, and neither sends
            # The generator's own command: forked, and about to become a worker.
            return GENERATOR if b"loadtest.load.worker" in command or command == self._command else OTHER
        if stat.parent not in self._role and stat.parent > 1:
            self._meet(stat.parent, new=False)
        parent = self._role.get(stat.parent, OTHER)
        # The network's own work is done for whoever sends and receives, which is mostly this load: nobody else's.
        return parent if parent in (CANDIDATE, METER) else METER if stat.name.startswith("ksoftirqd/") else OTHER

    def sample(self) -> bool:
        """Write down what has happened since the last sample. Gives whether others have done something that matters."""
        now_s = time.monotonic()
        newest = self._newest_pid()
        if newest < self._newest or newest - self._newest > _MOST_BEGUN or now_s - self._listed > _LIST_EVERY_S:
            self._list(new=True)
        elif newest != self._newest:
            began = [pid for pid in range(self._newest + 1, newest + 1) if self._meet(pid, new=True)]
            self._newest = newest
            if any(self._role[pid] <= GENERATOR for pid in began):
                self._follow()
        now = time.monotonic_ns()
        # Where somebody waits, or this came late itself, somebody else may have begun to work who has long stood still.
        waited, longest, spent = [0, 0], [0, 0], Counter[int]()
        everywhere = now - self._due > _LATE_NS
        for _ in range(_TRIES):
            now = time.monotonic_ns()
            for side, waits in enumerate(self._waits):
                total, most = waits.since(everywhere=everywhere)
                waited[side] += total
                longest[side] = max(longest[side], most)
            everywhere |= max(waited) > _LATE_NS
            for pid, by in self._spent.look(everywhere=everywhere):
                spent[pid] += by
            # Interrupted in between, it has seen some before and others after: then what happened meanwhile is added to all.
            if time.monotonic_ns() - now < _LATE_NS:
                break
        # Where nobody waited, it is of no interest on which core a little was used.
        matters = max(waited) > _HOT_NS or not self._waits[0].known
        sums = [0, 0, 0, 0]
        lines: list[str] = []
        others: list[str] = []
        for pid, by in spent.items():
            role = self._role[pid]
            sums[role] += by
            if role == OTHER:
                others += self._by_core(pid, by, lines, exactly=matters or by > _LATE_NS)
        for pid in self._spent.gone():
            del self._role[pid]
            self._threads.pop(pid, None)
        figures: list[int] = [now]
        for side, role in enumerate((CANDIDATE, GENERATOR)):
            figures += [sums[role], *((waited[side], longest[side]) if self._waits[side].known else (-1, -1))]
        figures.append(sums[METER])
        lines.append(f"S {' '.join(map(str, figures))} {' '.join(others)}".rstrip())
        if now_s - self._steal_at > _STEAL_EVERY_S:
            self._steal_at = now_s
            ticks = self._steal_ticks()
            if ticks != self._steal:
                lines.append(f"T {now} {' '.join(f'{core}:{ticks[core] - self._steal.get(core, 0)}' for core in ticks)}")
                self._steal = ticks
        os.write(self._record, ("\n".join(lines) + "\n").encode())
        return everywhere or sums[OTHER] > _LATE_NS

    def run(self) -> None:
        """Sample until standard input ends."""
        cost_s, period_s = 0.0, _PERIOD_S
        self._due = time.monotonic_ns() + int(period_s * 1e9)
        while not select.select([sys.stdin], [], [], max(0.0, (self._due - time.monotonic_ns()) / 1e9))[0]:
            before_s = time.process_time()
            busy = self.sample()
            cost_s += 0.1 * (time.process_time() - before_s - cost_s)
            wanted_s = _PERIOD_S if busy else 2 * _PERIOD_S
            self._due = time.monotonic_ns() + int(min(max(wanted_s, cost_s / _MOST_COST), _LONGEST_S) * 1e9)
        self.sample()

    def _by_core(self, pid: int, spent: int, lines: list[str], *, exactly: bool) -> list[str]:
        """Where another process had its CPU time."""
        if spent < _HOT_NS and pid not in self._named:
            return []  # thousands of those are less than the meter itself
        if pid in self._named and not exactly:
            self._threads.pop(pid, None)
            return [f"{pid}:{spent}:-1"]
        try:
            stat = _Stat(f"/proc/{pid}/stat")
            if pid not in self._named:
                self._named.add(pid)
                lines.append(f"N {pid} {stat.name}")
            if stat.threads == 1:
                return [f"{pid}:{spent}:{stat.core}"]
            known = self._threads.get(pid)
            threads = self._threads[pid] = {}
            parts = []
            for name in os.listdir(f"/proc/{pid}/task"):
                tid = int(name)
                with contextlib.suppress(OSError):
                    threads[tid] = time.clock_gettime_ns(_thread_clock(tid))
                    if known is not None and (its := threads[tid] - known.get(tid, 0)) > _HOT_NS:
                        parts.append((its, _Stat(f"/proc/{pid}/task/{tid}/stat").core))
        except (OSError, ValueError, IndexError):
            return [f"{pid}:{spent}:-1"] if pid in self._named else []
        # What no thread accounts for (one that ended, the first look) may have been anywhere.
        rest = spent - sum(its for its, _ in parts)
        if rest > 0:
            parts.append((rest, -1))
        return [f"{pid}:{its}:{core}" for its, core in parts]

    def _steal_ticks(self) -> dict[int, int]:
        found = {}
        for line in os.pread(self._stat, 1 << 16, 0).split(b"\n")[1:]:
            if not line.startswith(b"cpu"):
                break
            fields = line.split()
            found[int(fields[0][3:])] = int(fields[8]) if len(fields) > 8 else 0
        return found


def _ask(core: int, record: int, wake_ns: int) -> None:
    """Ask for a core again and again, and write down when it came late. Ends with its parent."""
    os.sched_setaffinity(0, {core})
    parent = os.getppid()
    due = time.monotonic_ns() + wake_ns
    while os.getppid() == parent:
        time.sleep(max(0, due - time.monotonic_ns()) / 1e9)
        now = time.monotonic_ns()
        if now - due >= _LATE_NS:
            os.write(record, b"H %d %d %d\n" % (core, due, now))
        due = max(due + wake_ns, now)


def main() -> None:
    record = int(sys.argv[1])
    watch = json.loads(sys.stdin.buffer.readline())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * _MOST_THREADS + 100)), hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the generator, who then ends this in order
    gc.disable()
    everywhere = os.sched_getaffinity(0) | set(watch["candidate_cores"]) | set(watch["generator_cores"])
    cores = sorted({*watch["candidate_cores"], *watch["generator_cores"]})[:_MOST_CORES]
    children = []
    for core in cores:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(OSError):  # a core that went offline
                _ask(core, record, _WAKE_NS * max(2, len(cores)) // 2)
            os._exit(0)
        children.append(child)
    # Its own work is better done where the candidate does not run.
    os.sched_setaffinity(0, everywhere - set(watch["candidate_cores"]) or everywhere)
    meter = _Meter(watch, children, record)
    meter.sample()
    print("ready", flush=True)
    try:
        meter.run()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
