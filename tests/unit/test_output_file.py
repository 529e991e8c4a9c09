"""Where a command writes what a user named: regular files whole, and nothing else is ever replaced by one."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from fmha_gen.errors import FileError, FmhaGenError
from fmha_gen.output_file import check_output, write_output
from fmha_gen.run import read_npz, write_npz


def test_a_pipe_is_written_into_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    check_output(pipe)
    write_npz(str(pipe), {"out": np.ones(3)})
    reader.join(30)
    (tmp_path / "copy.npz").write_bytes(got[0])
    with np.load(tmp_path / "copy.npz") as copy:
        assert (copy["out"] == 1).all()
    assert stat.S_ISFIFO(pipe.stat().st_mode) and {p.name for p in tmp_path.iterdir()} == {"pipe", "copy.npz"}


@pytest.mark.parametrize(("minor", "full"), [(3, False), (7, True)])
def test_a_device_stays_a_device(tmp_path: Path, minor: int, full: bool) -> None:
    """A null and a full device of our own: the system's must never be what a broken version is tried on."""
    device = tmp_path / "device"
    try:
        os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        device.open("wb").close()
    except PermissionError:
        pytest.skip("needs the right to make and open a device node")
    if full:
        with pytest.raises(FileError, match="device: cannot be written .No space left on device"):
            write_npz(str(device), {"out": np.ones(3)})
    else:
        write_npz(str(device), {"out": np.ones(3)})
    assert stat.S_ISCHR(device.stat().st_mode) and [p.name for p in tmp_path.iterdir()] == ["device"]


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link.npz", tmp_path / "there" / "out.npz"
    link.symlink_to(target)
    for value in (1, 2):  # of a target that is not there yet, and of one that is
        write_npz(str(link), {"out": np.full(3, value)})
        with np.load(target) as found:
            assert (found["out"] == value).all()
        assert link.is_symlink() and [p.name for p in target.parent.iterdir()] == ["out.npz"]


def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, error in (
        (tmp_path, IsADirectoryError), (tmp_path / "none" / "x", FileNotFoundError),
        (tmp_path / "file" / "x", FileNotFoundError), (tmp_path / ("x" * 300), OSError),
    ):  # fmt: skip
        with pytest.raises(error):
            check_output(path)
    if os.geteuid():  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        with pytest.raises(PermissionError):
            check_output(tmp_path / "locked" / "x")
    check_output(tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) in (["file"], ["file", "locked"])


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"before")

    def fail(file: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_output(tmp_path / "out", fail)
    assert (tmp_path / "out").read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1


def test_inputs_that_are_no_arrays_are_refused_without_advice_to_unpickle_them(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no arrays here")
    np.savez(tmp_path / "objects.npz", q=np.array([None], object))
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 99999), }".ljust(117) + b"\n"
    (tmp_path / "huge.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    for name, words in (
        ("text", r"text: cannot be read as .npz \(it is neither .npz nor .npy\)"),
        ("objects.npz", r"objects.npz: cannot be read as .npz \(it holds Python objects\)"),
        (".", r": cannot be read \(Is a directory\); check the path"),
        ("huge.npy", "huge.npy: (its arrays need more memory than there is|cannot be read)"),
    ):
        with pytest.raises(FmhaGenError, match=words) as e:
            read_npz(str(tmp_path / name))
        assert "pickle" not in str(e.value)
