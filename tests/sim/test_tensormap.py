"""Tensor maps against a byte-by-byte image written from the published chunk rules, and the driver's rules by name."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fmha_gen.sim.tensormap import TensorMap, TensorMapError

BASE = 0x7F00_0000_0000


def plain_map(**changes):
    """A valid 2-d map of 16-bit elements: 64 x 32, rows of 128 bytes."""
    fields = {"element": "bf16", "address": BASE, "extents": (64, 32), "strides_bytes": (128,), "box": (64, 8)}
    return TensorMap(**{**fields, **changes})


def load(tmap, memory, coords, smem_addr, smem_bytes=16384):
    """The whole shared memory after one load; bytes not written stay 0xEE."""
    smem = np.full(smem_bytes, 0xEE, np.uint8)
    plan = tmap.box_plan(coords, smem_addr)
    rows = smem.reshape(-1, plan.unit_bytes)
    rows[plan.smem // plan.unit_bytes] = plan.gather(memory, tmap.address, tmap.fill_unit(plan.unit_bytes))
    return smem


# Which chunk of row r holds logical chunk c, per span: 128B c^(r%8), 64B c^((r/2)%4), 32B c^((r/4)%2), where r counts
# rows of the span from shared address 0.
SPAN_RULES = {
    "128B": (128, lambda c, r: c ^ (r % 8)),
    "64B": (64, lambda c, r: c ^ (r // 2 % 4)),
    "32B": (32, lambda c, r: c ^ (r // 4 % 2)),
}


@pytest.mark.parametrize("swizzle", SPAN_RULES)
@pytest.mark.parametrize("smem_addr", [0, 1024, 384])
def test_swizzled_image_is_the_published_chunk_permutation(swizzle, smem_addr):
    span, rule = SPAN_RULES[swizzle]
    memory = np.random.default_rng(1).integers(0, 256, 64 * 256, dtype=np.uint8)  # 64 rows of 256 bytes
    tmap = TensorMap("u8", BASE, (256, 64), (256,), (span, 16), swizzle=swizzle)
    smem = load(tmap, memory, (256 - span, 5), smem_addr)
    want = np.full(smem.size, 0xEE, np.uint8)
    for row, byte in itertools.product(range(16), range(span)):
        absolute_row = smem_addr // span + row
        chunk = rule(byte // 16, absolute_row)
        want[absolute_row * span + chunk * 16 + byte % 16] = memory[(5 + row) * 256 + 256 - span + byte]
    assert np.array_equal(smem, want)


def test_first_rows_of_a_128_byte_swizzle_by_hand():
    # Row r holds chunks whose every byte is 8 r + c. Row 1 must read 1 0 3 2 5 4 7 6, row 5: 5 4 7 6 1 0 3 2.
    memory = np.repeat(np.arange(64, dtype=np.uint8), 16)
    tmap = TensorMap("u8", BASE, (128, 8), (128,), (128, 8), swizzle="128B")
    chunks = load(tmap, memory, (0, 0), 2048)[2048 : 2048 + 1024 : 16].reshape(8, 8)
    assert chunks[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert (chunks[1] - 8).tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
    assert (chunks[5] - 40).tolist() == [5, 4, 7, 6, 1, 0, 3, 2]


def test_out_of_bounds_is_filled_on_load_and_dropped_on_store():
    memory = np.arange(32 * 64, dtype=np.uint16)  # element (x, y) = 64 y + x
    for coords in [(0, 28), (0, -3), (-8, 0), (32, 30), (64, 0), (0, 2**31 - 1), (-(2**31), 3)]:
        tmap = plain_map()
        image = load(tmap, memory.view(np.uint8), coords, 0)[:1024].view(np.uint16).reshape(8, 64)
        for y, x in itertools.product(range(8), range(64)):
            gx, gy = coords[0] + x, coords[1] + y
            assert image[y, x] == (64 * gy + gx if 0 <= gx < 64 and 0 <= gy < 32 else 0), (coords, x, y)

        plan = tmap.box_plan(coords, 0)
        target = np.full(32 * 64, 0x7777, np.uint16)
        plan.scatter(target.view(np.uint8), BASE, np.full((plan.gmem.size, plan.unit_bytes), 0x11, np.uint8))
        hit = [0 <= x - coords[0] < 64 and 0 <= y - coords[1] < 8 for y in range(32) for x in range(64)]
        assert np.array_equal(target, np.where(hit, 0x1111, 0x7777))
        assert plan.box_bytes == 1024
        assert (plan.gmem_span() is None) == (not any(hit))


def test_row_end_inside_a_chunk_is_resolved_by_element():
    memory = np.arange(4 * 64, dtype=np.uint16)
    tmap = plain_map(extents=(61, 4))
    image = load(tmap, memory.view(np.uint8), (0, 0), 0)[: 4 * 128].view(np.uint16).reshape(4, 64)
    assert np.array_equal(image[:, :61], memory.reshape(4, 64)[:, :61])
    assert not image[:, 61:].any()
    # A box that starts off a chunk border near the end: columns 59, 60 exist, 61 does not.
    image = load(tmap, memory.view(np.uint8), (59, 1), 0)[:128].view(np.uint16)
    assert image.tolist() == [64 + 59, 64 + 60] + [0] * 62


def test_nan_fill_is_a_quiet_nan_of_the_element():
    memory = np.zeros(32 * 64, np.uint16)
    image = load(plain_map(fill="nan", element="f16"), memory.view(np.uint8), (0, 31), 0)[:1024].view(np.float16)
    assert not np.isnan(image[:64]).any() and np.isnan(image[64:]).all()
    image = load(plain_map(fill="nan"), memory.view(np.uint8), (0, 32), 0)[:1024].view(np.uint16)
    assert np.isnan((image.astype(np.uint32) << 16).view(np.float32)).all()


def test_element_strides_and_five_dimensions():
    memory = np.arange(3 * 2 * 4 * 5 * 8, dtype=np.int32)  # (c4=3, c3=2, c2=4, c1=5, c0=8)
    strides = (8 * 4, 40 * 4, 160 * 4, 320 * 4)
    tmap = TensorMap("s32", BASE, (8, 5, 4, 2, 3), strides, (4, 3, 4, 1, 2), element_strides=(1, 2, 3, 1, 1))
    # Rows 0, 2 of a box of 3 with step 2; planes 0, 3 of a box of 4 with step 3.
    image = load(tmap, memory.view(np.uint8), (4, 1, 0, 1, 1), 0)
    got = image[: tmap.box_bytes].view(np.int32).reshape(2, 1, 2, 2, 4)
    want = memory.reshape(3, 2, 4, 5, 8)[1:3, 1:2, 0:4:3, 1:4:2, 4:8]
    assert tmap.box_bytes == 2 * 2 * 2 * 4 * 4
    assert np.array_equal(got, want)


def test_strides_beyond_32_bits_and_stride_zero():
    far = 1 << 35
    tmap = plain_map(extents=(64, 8, 6), strides_bytes=(0, far), box=(64, 2, 1))
    plan = tmap.box_plan((0, 3, 5), 128)
    assert plan.valid is None and plan.unit_bytes == 16
    assert plan.gmem.tolist() == [BASE + 5 * far + 16 * c for c in range(8)] * 2
    assert plan.smem.tolist() == [128 + 16 * i for i in range(16)]
    assert plan.gmem_span() == (BASE + 5 * far, BASE + 5 * far + 128)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"address": BASE + 8}, "multiple of 16"),
        ({"strides_bytes": (136,)}, "multiple of 16"),
        ({"strides_bytes": (1 << 40,)}, "below 2^40"),
        ({"strides_bytes": (-128,)}, "below 2^40"),
        ({"extents": (64, 0)}, "extent 0 of dimension 1"),
        ({"extents": (64, (1 << 32) + 1)}, "extent 4294967297"),
        ({"box": (64, 257)}, "box 257"),
        ({"box": (64, 0)}, "box 0"),
        ({"box": (60, 8)}, "120 bytes; it must be a multiple of 16"),
        ({"box": (128, 8), "swizzle": "128B"}, "256 bytes; swizzle 128B allows 128"),
        ({"box": (64, 8), "swizzle": "64B"}, "128 bytes; swizzle 64B allows 64"),
        ({"box": (32, 8), "swizzle": "128B"}, "not modelled"),
        ({"strides_bytes": ()}, "strides_bytes has 0 entries"),
        ({"box": (64,)}, "box has 1 entries"),
        ({"extents": (), "strides_bytes": (), "box": ()}, "rank 0"),
        ({"extents": (64,) * 6, "strides_bytes": (128,) * 5, "box": (8,) * 6}, "rank 6"),
        ({"element_strides": (1, 9)}, "element stride 9"),
        ({"element": "b16"}, "element 'b16'"),
        ({"swizzle": "256B"}, "swizzle '256B'"),
        ({"fill": "one"}, "fill 'one'"),
        ({"interleave": "16B"}, "interleave '16B'"),
        ({"element": "u16", "fill": "nan"}, "floating-point"),
    ],
)
def test_every_rule_is_refused_by_name(changes, text):
    with pytest.raises(TensorMapError, match=text.replace("^", r"\^")):
        plain_map(**changes)


def test_driver_limits_that_are_allowed():
    plain_map(extents=(64, 1 << 32), strides_bytes=((1 << 40) - 16,))
    plain_map(box=(64, 256), strides_bytes=(0,), address=0)
    plain_map(extents=(8, 4), box=(64, 8))  # a box larger than the tensor


def test_copies_that_the_hardware_does_not_accept():
    tmap = plain_map()
    with pytest.raises(TensorMapError, match="3 coordinates for a map of rank 2"):
        tmap.box_plan((0, 0, 0), 0)
    with pytest.raises(TensorMapError, match="is 64 past a multiple of 128"):
        tmap.box_plan((0, 0), 64)
    with pytest.raises(TensorMapError, match="32-bit"):
        tmap.box_plan((0, 1 << 31), 0)
    with pytest.raises(IndexError):
        plan = tmap.box_plan((0, 30), 0)
        plan.gather(np.zeros(31 * 128, np.uint8), BASE, tmap.fill_unit(16))
