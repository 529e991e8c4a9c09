"""CUDA driver results in words: what they mean for someone who launches a prebuilt kernel, and what to do."""

from __future__ import annotations

from typing import Any

from ..errors import DriverError

# The CUDA version (cuDriverGetVersion) that each driver branch brought. Source: CUDA toolkit release notes, table of
# driver versions. A branch in between has the version of the one below it.
BRANCH_CUDA = {
    525: 12000, 530: 12010, 535: 12020, 545: 12030, 550: 12040, 555: 12050, 560: 12060, 565: 12070, 570: 12080,
    575: 12090, 580: 13000, 590: 13010, 595: 13020,
}  # fmt: skip

WORDS = {
    1: "an argument is out of the driver's range; report it with the problem's sizes and strides",
    2: "the device is out of memory; free some",
    3: "CUDA is not initialised in this process; a forked child must not use its parent's CUDA: spawn it instead",
    35: "the driver is older than the CUDA library on top of it; update the NVIDIA driver",
    100: "no CUDA device is visible; check CUDA_VISIBLE_DEVICES, or the container's GPU flags",
    101: "there is no such device; check CUDA_VISIBLE_DEVICES",
    200: "the kernel's file is no image that this driver can read; update the driver, or copy the bundle again",
    201: "the thread's CUDA context was destroyed or belongs to another device",
    209: "the kernel was built for another GPU architecture; add this device's to the spec's archs and build again",
    218: "the driver would have to compile PTX and cannot; bundles hold machine code: update the driver",
    222: "the kernel needs a newer driver (its toolchain is newer than this driver); update the NVIDIA driver",
    500: "the kernel is not in its file; the bundle's record and cubin do not belong together: rebuild the bundle",
    700: "a kernel accessed memory that is not there; the context is lost: run under compute-sanitizer",
    701: "the launch needs more registers or shared memory than the device has",
    715: "a kernel executed an illegal instruction; the context is lost",
    716: "a kernel accessed a misaligned address; the context is lost",
    719: "an earlier kernel failed; the context is lost: run with CUDA_LAUNCH_BLOCKING=1 to find it",
    900: "the driver does not allow it while a stream is captured into a graph; preload() before the capture",
    901: "an earlier error ended the graph capture; end it and start anew",
    906: "a launch on the legacy default stream while another stream is captured; launch on the capturing stream",
    802: "the system's fabric (NVSwitch) is not ready; check nvidia-fabricmanager",
    803: "the libcuda.so in use does not fit the kernel-mode driver; remove a stale compatibility library",
}


def required_cuda(min_driver: int) -> int:
    """The cuDriverGetVersion value that driver branch `min_driver` reports at least."""
    known = [branch for branch in BRANCH_CUDA if branch <= min_driver]
    return BRANCH_CUDA[max(known)] if known else 0


def branch_of(cuda_version: int) -> int | None:
    """The driver branch that brought `cuda_version`; None when older than the table."""
    known = [branch for branch, version in BRANCH_CUDA.items() if version <= cuda_version]
    return max(known) if known else None


def version_text(cuda_version: int) -> str:
    """``13.0`` for 13000."""
    return f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"


def error(api: Any, result: Any, where: str) -> DriverError:
    """A DriverError for a failed call: its CUDA name, text and meaning."""
    number = int(result)
    name, text = _name(api, result), _text(api, result)
    words = WORDS.get(number)
    return DriverError(f"{where}: {name} ({number}): {text}" + (f"; {words}" if words else ""))


def _name(api: Any, result: Any) -> str:
    err, name = api.cuGetErrorName(result)
    return name.decode() if int(err) == 0 and name else "unknown CUDA error"


def _text(api: Any, result: Any) -> str:
    err, text = api.cuGetErrorString(result)
    return text.decode() if int(err) == 0 and text else "no description"
