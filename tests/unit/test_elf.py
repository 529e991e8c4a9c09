"""The cubin reader against synthetic cubins, damaged ones, and (where the tools are) cuobjdump."""

from __future__ import annotations

import random

import pytest

from fmha_gen.elf import KernelParam, read_cubin
from fmha_gen.errors import BundleError
from tests.fake_cubin import make_cubin


def test_reads_every_field():
    cubin = read_cubin(make_cubin(("a_0", "b_1"), registers=120, stack_bytes=16, block=(384, 1, 1)), "x.cubin")
    assert (cubin.arch, cubin.abi_version, cubin.ptxas) == ("sm_100a", 8, "13.4.59")
    assert [k.symbol for k in cubin.kernels] == ["a_0", "b_1"]
    k = cubin.kernel("b_1", "x.cubin")
    assert (k.registers, k.stack_bytes, k.block, k.code_bytes) == (120, 16, (384, 1, 1), 128)
    assert k.params == (KernelParam(0, 0, 128), KernelParam(1, 128, 8), KernelParam(2, 136, 4))
    assert (k.param_bytes, k.param_base, k.static_smem_bytes) == (140, 0x380, 0)


@pytest.mark.parametrize(
    ("abi_version", "sm", "specific", "arch"),
    [
        (8, 100, True, "sm_100a"),
        (8, 103, True, "sm_103a"),
        (8, 90, True, "sm_90a"),
        (8, 90, False, "sm_90"),
        (7, 90, True, "sm_90a"),
        (7, 90, False, "sm_90"),
        (8, 120, True, "sm_120a"),
    ],
)
def test_architecture_of_both_abi_versions(abi_version, sm, specific, arch):
    """A02: the suffix is read from the header, never from an ordering of architectures."""
    assert read_cubin(make_cubin(abi_version=abi_version, sm=sm, specific=specific), "x").arch == arch


def test_unknown_kernel_is_named_with_those_present():
    with pytest.raises(BundleError, match=r"x\.cubin: no kernel 'other_0'.*has: k_0"):
        read_cubin(make_cubin(), "x.cubin").kernel("other_0", "x.cubin")


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"not an ELF" * 20, b"\x7fELF" + bytes(60), b"\0" * 4096])
def test_garbage_is_refused_by_name(data):
    with pytest.raises(BundleError, match=r"x\.cubin: not a whole cubin"):
        read_cubin(data, "x.cubin")


def test_every_truncation_is_refused():
    """A08: half a file must never reach a driver, which dies on it."""
    whole = make_cubin()
    for size in range(len(whole)):
        with pytest.raises(BundleError, match="not a whole cubin"):
            read_cubin(whole[:size], "x.cubin")


def test_random_damage_never_escapes_as_another_error():
    whole = make_cubin(("a_0", "b_1"))
    rng = random.Random(1)
    refused = 0
    for _ in range(4000):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            read_cubin(bytes(data), "x.cubin")
        except BundleError as e:
            refused += 1
            assert str(e).startswith("x.cubin: ")
    assert refused > 100


def test_other_machine_is_refused():
    data = bytearray(make_cubin())
    data[18] = 62  # x86-64
    with pytest.raises(BundleError, match="machine 62, a cubin has 190"):
        read_cubin(bytes(data), "x.cubin")
