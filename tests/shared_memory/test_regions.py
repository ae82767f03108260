"""Regions as clients use them, with a second instance standing for a second ingress process of the node."""

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gateway.engine.shared_memory import SharedMemoryRegions
from gateway.errors import AlreadyExists, InternalError, InvalidArgument, NotFound, Unsupported
from gateway.types import RegionRef
from tests.file_limit import no_file_longer_than

now = time.monotonic_ns


@pytest.fixture
def segment() -> Iterator[Callable[[bytes], str]]:
    """Make POSIX shared memory objects with given content; returns their keys."""
    made: list[str] = []

    def make(content: bytes) -> str:
        key = f"/gateway-test-{uuid.uuid4().hex}"
        Path(f"/dev/shm{key}").write_bytes(content)
        made.append(key)
        return key

    yield make
    for key in made:
        Path(f"/dev/shm{key}").unlink(missing_ok=True)


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[SharedMemoryRegions]:
    regions = SharedMemoryRegions(tmp_path / "regions")
    yield regions
    regions.close()


@pytest.fixture
def neighbour(regions: SharedMemoryRegions, tmp_path: Path) -> Iterator[SharedMemoryRegions]:
    """Another process's view of the same directory."""
    neighbour = SharedMemoryRegions(tmp_path / "regions")
    yield neighbour
    neighbour.close()


def test_a_registered_slice_is_read_and_written_at_its_offset(
    regions: SharedMemoryRegions, segment: Callable[[bytes], str]
) -> None:
    key = segment(b"0123456789abcdef")
    regions.register("r", key, 4, 8)
    assert bytes(regions.read(RegionRef("r", 2, 3), now())) == b"678"
    regions.write(RegionRef("r", 0, 8), b"WXYZ", now())
    assert Path(f"/dev/shm{key}").read_bytes() == b"0123WXYZ89abcdef"


def test_a_registration_through_one_process_holds_in_the_others(
    regions: SharedMemoryRegions, neighbour: SharedMemoryRegions, segment: Callable[[bytes], str]
) -> None:
    regions.register("r", segment(b"first..."), 0, 8)
    assert bytes(neighbour.read(RegionRef("r", 0, 5), now())) == b"first"
    assert neighbour.status() == regions.status()


def test_registrations_in_use_are_kept_young_for_those_who_clear_tmp(tmp_path: Path, segment: Callable[[bytes], str]) -> None:
    now_s = 0.0
    regions = SharedMemoryRegions(tmp_path / "regions", clock=lambda: now_s)
    for name in ("used", "waits"):
        regions.register(name, segment(b"first..."), 0, 8)
    for path in regions.directory.iterdir():
        os.utime(path, (0, 0))
    regions.read(RegionRef("used", 0, 5), now())
    now_s = 3600.0
    regions.read(RegionRef("used", 0, 5), now())
    assert [path.stat().st_mtime for path in regions.directory.iterdir()] == [0, 0]  # which is of their identity
    assert all(path.stat().st_atime for path in regions.directory.iterdir())
    regions.close()


def test_a_region_taken_back_through_one_process_is_gone_in_the_others(
    regions: SharedMemoryRegions, neighbour: SharedMemoryRegions, segment: Callable[[bytes], str]
) -> None:
    regions.register("r", segment(b"first..."), 0, 8)
    neighbour.read(RegionRef("r", 0, 5), now())
    regions.unregister("r")
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        neighbour.read(RegionRef("r", 0, 5), now())


def held(keys: list[str]) -> int:
    """How many of these objects this process has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of another thread, or of the listing
            found += os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)").removeprefix("/dev/shm") in keys
    return found


def test_regions_taken_back_through_another_process_do_not_stay_open(
    regions: SharedMemoryRegions, neighbour: SharedMemoryRegions, segment: Callable[[bytes], str]
) -> None:
    keys = [segment(b"first...") for _ in range(40)]
    for number, key in enumerate(keys):
        regions.register(f"r{number}", key, 0, 8)
        neighbour.read(RegionRef(f"r{number}", 0, 5), now())
        regions.unregister(f"r{number}")
        os.unlink(f"/dev/shm{key}")
        assert held(keys) == 1


def test_of_many_open_regions_a_sixteenth_may_be_taken_back_before_it_is_closed(
    regions: SharedMemoryRegions, neighbour: SharedMemoryRegions, segment: Callable[[bytes], str]
) -> None:
    kept = segment(b"kept....")
    for number in range(160):
        regions.register(f"kept{number}", kept, 0, 8)
        neighbour.read(RegionRef(f"kept{number}", 0, 5), now())
    keys = [segment(b"first...") for _ in range(40)]
    for number, key in enumerate(keys):
        regions.register(f"r{number}", key, 0, 8)
        neighbour.read(RegionRef(f"r{number}", 0, 5), now())
        regions.unregister(f"r{number}")
        assert held(keys) <= 11
    assert held([kept]) == 160
    assert bytes(neighbour.read(RegionRef("kept0", 0, 4), now())) == b"kept"


def test_a_renewed_registration_is_read_from_its_new_object(
    regions: SharedMemoryRegions, neighbour: SharedMemoryRegions, segment: Callable[[bytes], str]
) -> None:
    regions.register("r", segment(b"first..."), 0, 8)
    neighbour.read(RegionRef("r", 0, 5), now())
    regions.unregister("r")
    regions.register("r", segment(b"second.."), 0, 8)
    assert bytes(neighbour.read(RegionRef("r", 0, 6), now())) == b"second"


def test_a_region_registered_after_a_request_came_is_neither_read_nor_written_for_it(
    regions: SharedMemoryRegions, neighbour: SharedMemoryRegions, segment: Callable[[bytes], str]
) -> None:
    key = segment(b"second..")
    regions.register("r", segment(b"first..."), 0, 8)
    asked_ns = now()
    neighbour.write(RegionRef("r", 0, 8), b"answer", asked_ns)
    regions.unregister("r")
    regions.register("r", key, 0, 8)
    for each in (regions, neighbour):
        with pytest.raises(NotFound, match="'r' was registered after the request came"):
            each.write(RegionRef("r", 0, 8), b"answer", asked_ns)
        with pytest.raises(NotFound, match="'r' was registered after the request came"):
            each.read(RegionRef("r", 0, 8), asked_ns)
        assert bytes(each.read(RegionRef("r", 0, 8), now())) == b"second.."


def test_registrations_within_a_tick_of_the_file_system_are_told_apart(
    regions: SharedMemoryRegions, segment: Callable[[bytes], str], tmp_path: Path
) -> None:
    key = segment(b"first...")
    times = set()
    for _ in range(20):
        regions.register("r", key, 0, 8)
        (file,) = (tmp_path / "regions").iterdir()
        times.add(file.stat().st_mtime_ns)
        regions.unregister("r")
    assert len(times) == 20


def test_status_lists_regions_by_name(regions: SharedMemoryRegions, segment: Callable[[bytes], str]) -> None:
    key = segment(bytes(16))
    regions.register("b", key, 0, 8)
    regions.register("a/../x \N{SNOWMAN}", key, 8, 8)
    assert regions.status("b") == [{"name": "b", "key": key, "offset": 0, "byte_size": 8}]
    assert [region["name"] for region in regions.status()] == ["a/../x \N{SNOWMAN}", "b"]
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'c'"):
        regions.status("c")


def test_an_empty_name_unregisters_all(regions: SharedMemoryRegions, segment: Callable[[bytes], str]) -> None:
    key = segment(bytes(16))
    regions.register("a", key, 0, 8)
    regions.register("b", key, 8, 8)
    regions.unregister()
    assert regions.status() == []


def test_unregistering_an_unknown_region_is_no_error(regions: SharedMemoryRegions) -> None:
    regions.unregister("nobody")


def test_a_name_that_is_taken_is_refused_and_keeps_its_region(
    regions: SharedMemoryRegions, neighbour: SharedMemoryRegions, segment: Callable[[bytes], str]
) -> None:
    first = segment(b"first...")
    regions.register("r", first, 0, 8)
    with pytest.raises(AlreadyExists, match="shared memory region 'r' already in manager"):
        neighbour.register("r", segment(b"second.."), 0, 8)
    assert regions.status("r")[0]["key"] == first


@pytest.mark.parametrize("key", ["", "/", "..", "/..", "/../etc/passwd", "a/b", "//etc/passwd", "/a\0b", "/" + "x" * 256])
def test_a_key_cannot_leave_the_shared_memory_directory(regions: SharedMemoryRegions, key: str) -> None:
    with pytest.raises(InvalidArgument, match="Unable to open shared memory region"):
        regions.register("r", key, 0, 1)


def test_a_symbolic_link_is_not_followed(regions: SharedMemoryRegions, segment: Callable[[bytes], str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(16))
    key = segment(b"")
    os.unlink(f"/dev/shm{key}")
    os.symlink(tmp_path / "secret", f"/dev/shm{key}")
    with pytest.raises(InvalidArgument, match="Unable to open shared memory region"):
        regions.register("r", key, 0, 8)


def test_a_missing_object_is_refused(regions: SharedMemoryRegions) -> None:
    with pytest.raises(InvalidArgument, match="Unable to open shared memory region: '/gateway-test-none'"):
        regions.register("r", "/gateway-test-none", 0, 8)


@pytest.mark.parametrize(("offset", "byte_size"), [(0, 17), (9, 8), (-1, 4), (0, 0), (0, -1), (1 << 63, 1)])
def test_a_region_outside_of_its_object_is_refused(
    regions: SharedMemoryRegions, segment: Callable[[bytes], str], offset: int, byte_size: int
) -> None:
    with pytest.raises(InvalidArgument, match="outside of its 16 bytes"):
        regions.register("r", segment(bytes(16)), offset, byte_size)
    assert regions.status() == []


@pytest.mark.parametrize(("offset", "byte_size"), [(0, 9), (8, 1), (-1, 4), (0, -1), (1 << 63, 1)])
def test_a_slice_outside_of_its_region_is_refused(
    regions: SharedMemoryRegions, segment: Callable[[bytes], str], offset: int, byte_size: int
) -> None:
    regions.register("r", segment(bytes(16)), 0, 8)
    with pytest.raises(InvalidArgument, match="Invalid offset"):
        regions.read(RegionRef("r", offset, byte_size), now())
    with pytest.raises(InvalidArgument, match="Invalid offset"):
        regions.write(RegionRef("r", offset, byte_size), b"", now())


def test_results_longer_than_their_slice_are_refused(regions: SharedMemoryRegions, segment: Callable[[bytes], str]) -> None:
    regions.register("r", segment(bytes(16)), 0, 16)
    with pytest.raises(InvalidArgument, match="at least 5 bytes"):
        regions.write(RegionRef("r", 0, 4), b"12345", now())


def test_an_object_truncated_after_its_registration_is_an_error_and_not_a_crash(
    regions: SharedMemoryRegions, segment: Callable[[bytes], str]
) -> None:
    key = segment(bytes(16))
    regions.register("r", key, 0, 16)
    regions.read(RegionRef("r", 0, 16), now())
    os.truncate(f"/dev/shm{key}", 4)
    with pytest.raises(InvalidArgument, match="shorter than registered"):
        regions.read(RegionRef("r", 0, 16), now())
    with pytest.raises(InvalidArgument, match="shorter than registered"):
        regions.write(RegionRef("r", 8, 8), b"12345678", now())


def test_a_region_for_which_there_is_no_room_is_an_error_of_that_write(
    regions: SharedMemoryRegions, segment: Callable[[bytes], str]
) -> None:
    key = segment(bytes(16))
    regions.register("r", key, 0, 16)
    with no_file_longer_than(8), pytest.raises(InternalError, match=f"'r': object '{key}' cannot be written: File too large"):
        regions.write(RegionRef("r", 8, 8), b"12345678", now())
    regions.write(RegionRef("r", 8, 8), b"12345678", now())
    assert bytes(regions.read(RegionRef("r", 8, 8), now())) == b"12345678"


def test_a_registration_that_cannot_be_kept_leaves_nothing_behind(
    regions: SharedMemoryRegions, segment: Callable[[bytes], str], tmp_path: Path
) -> None:
    key = segment(bytes(16))
    with no_file_longer_than(8), pytest.raises(InternalError, match=r"'r' cannot be kept \(server\.run_dir\): File too large"):
        regions.register("r", key, 0, 16)
    assert list((tmp_path / "regions").iterdir()) == []
    regions.register("r", key, 0, 16)


def test_a_registration_that_was_damaged_is_an_error_of_those_who_use_it(
    regions: SharedMemoryRegions, segment: Callable[[bytes], str], tmp_path: Path
) -> None:
    regions.register("r", segment(bytes(16)), 0, 16)
    (file,) = (tmp_path / "regions").iterdir()
    file.write_text('{"name": "r"')
    for use in (
        lambda: regions.read(RegionRef("r", 0, 1), now()),
        lambda: regions.write(RegionRef("r", 0, 1), b"1", now()),
        regions.status,
    ):
        with pytest.raises(InternalError, match=r"server\.run_dir"):
            use()
    regions.unregister("r")
    assert regions.status() == []


@pytest.mark.parametrize("name", ["\ud800", "x" * 1025, ""])
def test_a_name_that_cannot_be_registered_is_refused_everywhere(
    regions: SharedMemoryRegions, segment: Callable[[bytes], str], name: str
) -> None:
    key = segment(bytes(16))
    uses = [
        lambda: regions.register(name, key, 0, 16),
        lambda: regions.read(RegionRef(name, 0, 1), now()),
        lambda: regions.write(RegionRef(name, 0, 1), b"1", now()),
        *([lambda: regions.status(name), lambda: regions.unregister(name)] if name else []),
    ]
    for use in uses:
        with pytest.raises(InvalidArgument, match=r"shared memory region name: expected 1 to 1024 characters") as caught:
            use()
        caught.value.message.encode()
        assert len(caught.value.message) < 200


@pytest.mark.parametrize("key", ["/\ud800", "/" + "x" * 100_000])
def test_a_key_that_is_no_text_is_refused_in_words_that_are(regions: SharedMemoryRegions, key: str) -> None:
    with pytest.raises(InvalidArgument, match="Unable to open shared memory region") as caught:
        regions.register("r", key, 0, 1)
    caught.value.message.encode()
    assert len(caught.value.message) < 2000


def test_an_output_without_elements_writes_nothing(regions: SharedMemoryRegions, segment: Callable[[bytes], str]) -> None:
    regions.register("r", segment(b"untouched"), 0, 9)
    regions.write(RegionRef("r", 0, 4), memoryview(np.zeros((0, 4), np.float32)), now())
    assert bytes(regions.read(RegionRef("r", 0, 9), now())) == b"untouched"


def test_what_was_read_stays_when_the_client_writes_on(regions: SharedMemoryRegions, segment: Callable[[bytes], str]) -> None:
    key = segment(b"before..")
    regions.register("r", key, 0, 8)
    view = regions.read(RegionRef("r", 0, 8), now())
    Path(f"/dev/shm{key}").write_bytes(b"after...")
    assert bytes(view) == b"before.."


def test_switched_off_everything_is_unsupported(tmp_path: Path) -> None:
    regions = SharedMemoryRegions(tmp_path / "regions", enabled=False)
    with pytest.raises(Unsupported, match=r"server\.system_shared_memory"):
        regions.register("r", "/x", 0, 1)
    with pytest.raises(Unsupported):
        regions.read(RegionRef("r", 0, 1), now())
    assert regions.status() == []
    assert not (tmp_path / "regions").exists()
