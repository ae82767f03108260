"""The directories of a node's processes are theirs alone, or the gateway does not start."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.errors import ConfigError
from gateway.process.run_dir import (
    forget_regions,
    fresh_run_dir,
    hold_run_dir,
    make_run_dir,
    new_run_dir,
    private_directory,
    remove_shared_run_dir,
    shared_run_dir,
)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make what belongs to others")
NOBODY = 65534


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_missing_is_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        metrics = make_run_dir(tmp_path / "above" / "run")
    finally:
        os.umask(before)
    assert metrics == tmp_path / "above" / "run" / "metrics"
    assert [mode(path) for path in (metrics, metrics.parent, metrics.parent.parent)] == [0o700] * 3
    assert make_run_dir(tmp_path / "above" / "run") == metrics


def test_directories_of_ours_that_others_may_read_are_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "run" / "metrics").mkdir(parents=True)
    (tmp_path / "run").chmod(0o755)
    (tmp_path / "run" / "metrics").chmod(0o777)
    assert mode(make_run_dir(tmp_path / "run")) == 0o700
    assert mode(tmp_path / "run") == 0o755  # the operator's, who may keep more in it


def test_a_symbolic_link_in_the_place_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=rf"^server.run_dir: '{tmp_path}/run/metrics': it is a symbolic link: expected a"):
        make_run_dir(tmp_path / "run")


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"'.*/run': it is no directory"):
        make_run_dir(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"'.*/run': it is no directory"):
        make_run_dir(tmp_path / "run" / "below")


def test_links_on_the_way_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert make_run_dir(tmp_path / "link") == tmp_path / "real" / "metrics"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="too many symbolic links"):
        make_run_dir(tmp_path / "loop" / "run")


def test_a_directory_that_everyone_can_rename_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "run").mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=rf"^server.run_dir: '{tmp_path}': everyone can write to it and rename what is in it"):
        make_run_dir(tmp_path / "run")
    tmp_path.chmod(0o1777)
    make_run_dir(tmp_path / "run")


@needs_root
def test_a_directory_that_a_group_can_rename_is_refused_but_for_roots(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    make_run_dir(tmp_path / "run")
    os.chown(tmp_path, -1, NOBODY)
    with pytest.raises(ConfigError, match=f"group {NOBODY} can write to it"):
        make_run_dir(tmp_path / "run")


@needs_root
@pytest.mark.parametrize("theirs", ["above", "above/run", "above/run/metrics"])
def test_a_directory_of_another_user_is_refused(tmp_path: Path, theirs: str) -> None:
    make_run_dir(tmp_path / "above" / "run")
    os.chown(tmp_path / theirs, NOBODY, -1)
    with pytest.raises(ConfigError, match=f"^server.run_dir: '{tmp_path / theirs}': it belongs to user {NOBODY}"):
        make_run_dir(tmp_path / "above" / "run")


@needs_root
def test_a_link_of_another_user_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    os.chown(tmp_path / "link", NOBODY, -1, follow_symlinks=False)
    with pytest.raises(
        ConfigError, match=f"'{tmp_path}/link': it belongs to user {NOBODY}, who could put another in its place"
    ):
        make_run_dir(tmp_path / "link" / "run")


def test_a_temporary_directory_that_everyone_can_rename_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with fresh_run_dir() as run_dir:
        assert Path(run_dir).parent == tmp_path
    assert shared_run_dir("x") == tmp_path / f"gateway-{os.geteuid()}" / "x"
    tmp_path.chmod(0o777)
    with fresh_run_dir() as run_dir:
        assert Path(run_dir).parent == Path("/dev/shm")
        assert mode(Path(run_dir)) == 0o700


def test_where_nothing_usual_can_be_written_to_memory_is_taken_or_what_to_do_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    with fresh_run_dir() as run_dir:
        assert Path(run_dir).parent == Path("/dev/shm")
    monkeypatch.setattr("gateway.process.run_dir._MEMORY", tmp_path / "none")
    with pytest.raises(
        ConfigError, match=r"^server.run_dir: null: none of /tmp, .* expected a directory .* set it, or .* TMPDIR"
    ):
        new_run_dir()


def test_what_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^server.run_dir: '{tmp_path}/x+': cannot be (made|used): File name too long"):
        private_directory(tmp_path / ("x" * 300))


def test_a_shared_run_dir_is_removed_but_not_from_where_others_could_have_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    private_directory(shared_run_dir("one") / "regions")
    other = private_directory(shared_run_dir("other"))
    remove_shared_run_dir("one")
    remove_shared_run_dir("never made")
    assert [path.name for path in other.parent.iterdir()] == ["other"]
    other.parent.chmod(0o777)
    remove_shared_run_dir("other")
    assert other.exists()


def test_regions_are_forgotten_once_nobody_holds_their_run_dir(tmp_path: Path) -> None:
    forget_regions(tmp_path / "missing")
    registered = tmp_path / "regions" / "r.json"
    registered.parent.mkdir()
    registered.touch()
    with hold_run_dir(tmp_path):
        with hold_run_dir(tmp_path):
            forget_regions(tmp_path)
        forget_regions(tmp_path)
        assert registered.exists()
    forget_regions(tmp_path)
    assert list(registered.parent.iterdir()) == []


KILLED = """
import os, signal
from gateway.process.run_dir import new_run_dir
run_dir, held = new_run_dir()
(run_dir / "metrics").mkdir()
(run_dir / "metrics" / "link").symlink_to(os.environ["KEPT"])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_what_a_killed_process_has_left_is_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "gateway-run-link").symlink_to(kept)
    with fresh_run_dir() as living:
        killed = subprocess.run(
            [sys.executable, "-c", KILLED],
            env=os.environ | {"TMPDIR": str(tmp_path), "KEPT": str(kept)},
            check=False,
            timeout=60,
        )
        assert killed.returncode == -signal.SIGKILL
        assert len(list(tmp_path.glob("gateway-run-*"))) == 3  # with the link
        with fresh_run_dir() as mine:
            assert {*tmp_path.glob("gateway-run-*")} == {living, mine, tmp_path / "gateway-run-link"}
    assert [path.name for path in tmp_path.glob("gateway-run-*")] == ["gateway-run-link"]
    assert (kept / "file").exists()


def test_what_a_user_has_made_is_never_removed_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / "gateway-run-results"
    (own / "sub").mkdir(parents=True)
    (own / "sub" / "figures.csv").touch()
    configured = tmp_path / "gateway-run-12345678"  # as server.run_dir
    make_run_dir(configured)
    with hold_run_dir(configured):
        pass
    with fresh_run_dir():
        assert (own / "sub" / "figures.csv").exists()
        assert configured.exists()


def test_what_is_left_is_removed_however_many_others_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = []
    for number in range(600):
        path = tmp_path / f"gateway-run-{number:08}"
        path.mkdir()
        if number % 100 == 0:
            (path / ".for-one-process").touch()
            left.append(path)
    with fresh_run_dir():
        assert not any(path.exists() for path in left)
        assert len(list(tmp_path.glob("gateway-run-*"))) == 600 - len(left) + 1
