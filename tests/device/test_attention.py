"""Every kernel of a bundle that runs on this GPU, on the GPU: numbers, bits, memory. Case ids refer to public reports.

Each test runs once per kind (dtype, head dims, mask) and takes every kernel of the kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fmha_gen.manifest import KernelEntry
from fmha_gen.runtime import Bundle, Device
from fmha_gen.runtime.select import runs_on
from fmha_gen.verify.bench import CudaBench
from fmha_gen.verify.cases import LENGTHS, full_cases
from fmha_gen.verify.kernel import KernelCheck

pytestmark = pytest.mark.device

KINDS = [
    (dtype, dims, causal)
    for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
    for causal in (False, True)
    for dtype in ("bf16", "fp16")
]
CANARY = 777.0
Kind = tuple[str, tuple[int, int], bool]


def name_of(kind: Kind) -> str:
    dtype, (d, dv), causal = kind
    return f"{dtype}-d{d if d == dv else f'{d}x{dv}'}-{'causal' if causal else 'full'}"


def of_kind(entry: KernelEntry, kind: Kind) -> bool:
    serves = entry.serves
    dtype, dims, causal = kind
    return (
        (serves.dtype, (serves.head_dim_qk, serves.head_dim_v)) == (dtype, dims)
        and ("causal" if causal else "full") in serves.masks
        and not serves.features
    )


class Kernels:
    """The kernels of one kind. Calling it runs attention on torch tensors with each of them."""

    def __init__(self, bundle: Bundle, kind: Kind, entries: list[KernelEntry]) -> None:
        self.bundle, self.entries = bundle, entries
        self.dtype_name, (self.d, self.dv), self.causal = kind

    @property
    def dtype(self) -> Any:
        import torch

        return {"bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype_name]

    def random(self, *shape: int) -> Any:
        import torch

        return torch.randn(shape, device="cuda").to(self.dtype)

    def qkv(self, b: int, sq: int, sk: int, heads: int, heads_kv: int) -> tuple[Any, Any, Any]:
        return (
            self.random(b, sq, heads, self.d), self.random(b, sk, heads_kv, self.d),
            self.random(b, sk, heads_kv, self.dv),
        )  # fmt: skip

    def each(self, q: Any, k: Any, v: Any, out: Any = None, lse: Any = None, **options: Any) -> Iterator[Any]:
        """(kernel id, out, lse) of every kernel; outputs start as canaries."""
        import torch

        if out is None:
            out = torch.empty(*q.shape[:3], v.shape[3], device="cuda", dtype=q.dtype)
        if lse is None:
            lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
        for entry in self.entries:
            out.fill_(CANARY)
            lse.fill_(CANARY)
            self.bundle.attention(q, k, v, out, lse=lse, causal=self.causal, variant=entry.id, **options)
            torch.cuda.synchronize()
            yield entry.id, out, lse

    def check(self, q: Any, k: Any, v: Any, what: str = "", softmax_scale: float | None = None, **options: Any) -> None:
        from tests.device.torch_reference import problems, reference

        ref = reference(q, k, v, softmax_scale, self.causal)
        for kernel, out, lse in self.each(q, k, v, softmax_scale=softmax_scale, **options):
            assert not problems(out, lse, ref), f"{kernel}: {what}"

    @property
    def seen(self) -> Callable[[int, int], list[int]]:
        """How many keys each row sees, for (seqlen_q, seqlen_k)."""
        if not self.causal:
            return lambda sq, sk: [sk] * sq
        return lambda sq, sk: [min(max(i + 1 + sk - sq, 0), sk) for i in range(sq)]


@pytest.fixture(params=KINDS, ids=name_of)
def kernels(request: pytest.FixtureRequest, bundle: Bundle, gpu: Device) -> Kernels:
    entries = [e for e in bundle.kernels if runs_on(e, gpu) and of_kind(e, request.param)]
    if not entries:
        pytest.skip(f"the bundle has no {name_of(request.param)} for {gpu.describe()}")
    return Kernels(bundle, request.param, entries)


@pytest.fixture
def torch_kernels(kernels: Kernels) -> Kernels:
    torch = pytest.importorskip("torch", reason="needs torch to make and compare tensors")
    torch.manual_seed(0)  # the same numbers whichever tests run, and in whatever order
    return kernels


def test_no_kernel_is_left_out(bundle: Bundle, gpu: Device) -> None:
    mine = [e for e in bundle.kernels if runs_on(e, gpu)]
    assert mine, f"no kernel of {bundle.path} runs on {gpu.describe()}"
    assert [e.id for e in mine if not any(of_kind(e, kind) for kind in KINDS)] == []


def test_the_cases_of_verify(kernels: Kernels) -> None:
    """Lengths, ratios, grids, poison, canaries, logits of every kind, no keys, rows without keys; numpy only."""
    bench = CudaBench(kernels.bundle.path)
    for entry in kernels.entries:
        verdict = KernelCheck(bench, entry, range(3)).run(full_cases(), "", "")
        assert verdict.problems == (), entry.id
        assert verdict.num_problems == len(full_cases())


def test_every_pair_of_lengths(torch_kernels: Kernels) -> None:
    ratios = (1, 2, 3, 7, 8)
    for i, sq in enumerate(LENGTHS):
        for j, sk in enumerate(LENGTHS):
            ratio, kv_heads = ratios[(i + 2 * j) % 5], 1 + (i + j) % 2
            torch_kernels.check(*torch_kernels.qkv(2, sq, sk, ratio * kv_heads, kv_heads), f"{sq} x {sk}")


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 28, 64])
def test_h01_every_ratio(torch_kernels: Kernels, ratio: int) -> None:
    for sq in (1, 130):
        torch_kernels.check(*torch_kernels.qkv(2, sq, 150, 2 * ratio, 2), f"ratio {ratio}, {sq} queries")


def test_many_tiles_and_long_rows(torch_kernels: Kernels) -> None:
    """More tiles than the device has multiprocessors, and more keys than any pipeline holds."""
    torch_kernels.check(*torch_kernels.qkv(3, 1500, 1333, 24, 8), "864 tiles or more")
    torch_kernels.check(*torch_kernels.qkv(1, 300, 8209, 2, 1), "long rows")
    torch_kernels.check(*torch_kernels.qkv(1, 4173, 4109, 3, 1), "both long")
    torch_kernels.check(*torch_kernels.qkv(700, 3, 5, 2, 1), "large batch")


def test_m02_m03_m06_l01_closed_forms(torch_kernels: Kernels) -> None:
    """Zero queries weigh keys alike: LSE is the logarithm of how many a row sees, in base e; values tell which."""
    import torch

    for sq, sk in ((2, 5), (1, 300), (65, 32), (300, 299), (300, 173), (300, 172), (300, 171), (256, 256), (5, 0)):
        q, k, v = torch_kernels.qkv(2, sq, sk, 4, 2)
        q.zero_()
        keys = torch.arange(sk, device="cuda").to(torch_kernels.dtype)[None, :, None, None] / 256
        v.copy_(keys.expand_as(v))
        n = torch.tensor(torch_kernels.seen(sq, sk), device="cuda", dtype=torch.float64)
        sums = torch.cat([torch.zeros(1, device="cuda", dtype=torch.float64), keys.double().flatten().cumsum(0)])
        means = (sums[n.long()] / n.clamp(min=1))[None, :, None, None]
        for kernel, out, lse in torch_kernels.each(q, k, v):
            where = f"{kernel}: {sq} x {sk}"
            assert torch.allclose(lse.double(), n.log().expand_as(lse), atol=1e-5, rtol=0), where
            assert torch.allclose(out.double(), means.expand_as(out), rtol=2**-7, atol=1e-6), where
            assert (out[:, n == 0] == 0).all() and (lse[..., n == 0] == -math.inf).all(), where


@pytest.mark.parametrize("step", [4, 6, 30, 68, 70, 85, 90, 200, 900])
def test_rows_that_outgrow_the_blocks_before(torch_kernels: Kernels, step: float) -> None:
    """Logits that jump by `step` four times on the way to the first keys, and by other amounts in other rows of a warp.

    Exponentials with the shift of the blocks before stay small, grow, or overflow float32 (from 88 on), side by side.
    Of rows with one large weight float32 rounds nothing, so that its RMS error is no measure here.
    """
    from tests.device.torch_reference import problems, reference

    for sq, sk in ((257, 1300), (70, 1411), (1, 900)):
        q, k, v = torch_kernels.qkv(1, sq, sk, 4, 2)
        q, k = q * 0.1, k * 0.1
        for row, part in enumerate((1.0, 0.0, 0.5, -1.0, 1 / 64)):
            q[:, row::5, :, 0] = part
        for jumps, key in enumerate((1100, 700, 300, 3), 1):
            k[:, min(key, sk - 1), :, 0] = jumps * step
        ref = dataclasses.replace(reference(q, k, v, 1.0, torch_kernels.causal), rms=math.nan)
        for kernel, out, lse in torch_kernels.each(q, k, v, softmax_scale=1.0):
            assert not problems(out, lse, ref), f"{kernel}: {sq} x {sk}"


def test_a_nan_row_beside_others(torch_kernels: Kernels) -> None:
    from tests.device.torch_reference import problems, reference

    q, k, v = torch_kernels.qkv(2, 150, 900, 2, 1)
    q[:, 37] = 0
    ref = reference(q, k, v, None, torch_kernels.causal)
    bad = q.clone()
    bad[1, 37, 0, 3] = math.nan
    for kernel, out, lse in torch_kernels.each(bad, k, v):
        assert out[1, 37, 0].isnan().all() and lse[1, 0, 37].isnan(), kernel
        out[1, 37, 0] = v[1, : torch_kernels.seen(150, 900)[37], 0].double().mean(0)
        lse[1, 0, 37] = math.log(torch_kernels.seen(150, 900)[37])
        assert not problems(out, lse, ref), kernel


def test_leaks_of_keys_that_no_row_sees(torch_kernels: Kernels) -> None:
    """NaN and infinity in key blocks beyond a causal tile's reach change no bit of it.

    Inside the last block that a tile of rows needs they do: 0 x NaN is NaN in a matrix product.
    """
    import torch

    if not torch_kernels.causal:
        pytest.skip("every row of a full mask sees every key")
    q, k, v = torch_kernels.qkv(1, 1000, 1100, 2, 1)
    clean = [(out[:, :50].clone(), lse[..., :50].clone()) for _, out, lse in torch_kernels.each(q, k, v)]
    for poison in (math.nan, math.inf, -math.inf, 3e4):
        for t in (k, v):
            t[:, 800:] = poison  # row i sees keys up to i + 100
        for (kernel, out, lse), (want, want_lse) in zip(torch_kernels.each(q, k, v), clean, strict=True):
            assert torch.equal(out[:, :50], want) and torch.equal(lse[..., :50], want_lse), f"{kernel}: {poison}"


def test_s04_scales(torch_kernels: Kernels) -> None:
    q, k, v = torch_kernels.qkv(1, 130, 257, 2, 1)
    for scale in (None, 0.0, 1e-30, 1e-3, 1.0, 10.0):
        torch_kernels.check(q, k, v, f"scale {scale}", softmax_scale=scale)


# ---- strides


def test_t02_t04_views_without_a_copy(torch_kernels: Kernels) -> None:
    """Slices of a fused QKV, heads before rows, every second row, size-1 axes of any stride, expanded K and V."""
    t = torch_kernels
    import torch

    width = 2 * t.d + t.dv
    fused = t.random(2, 140, 3, width)
    q, k, v = fused[..., : t.d], fused[..., t.d : 2 * t.d], fused[..., 2 * t.d :]
    t.check(q, k, v, "fused qkv")
    room = torch.full((2, 4, 150, t.dv + 8), CANARY, device="cuda", dtype=t.dtype)
    out = room[:, :, 3:143, : t.dv].transpose(1, 2)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in t.qkv(2, 140, 170, 4, 2))
    t.check(q, k, v, "bhsd", out=out)
    room[:, :, 3:143, : t.dv] = CANARY
    assert (room == CANARY).all(), "memory beside out was written"
    q, k, v = t.qkv(2, 140, 340, 4, 2)
    t.check(q, k[:, ::2], v[:, 1::2], "every second row")
    k, v = k[:, :170, :1].expand(-1, -1, 4, -1), v[:, :170, :1].expand(-1, -1, 4, -1)
    t.check(q, k, v, "expanded heads")
    t.check(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), "expanded batch")
    t.check(q, k[:, :1].expand(-1, 300, -1, -1), v[:, :1].expand(-1, 300, -1, -1), "one key again and again")
    one_q, one_k, one_v = (
        x[:1, :1, :1].as_strided((1, 1, 1, x.shape[3]), (7, 0, 2**40, 1)) for x in t.qkv(1, 1, 1, 1, 1)
    )
    t.check(one_q, one_k, one_v, "size-1 axes")


def test_lse_of_any_strides(torch_kernels: Kernels) -> None:
    import torch

    from tests.device.torch_reference import problems, reference

    q, k, v = torch_kernels.qkv(2, 140, 70, 4, 2)
    ref = reference(q, k, v, None, torch_kernels.causal)
    room = torch.full((2, 140, 9, 2), CANARY, device="cuda")
    lse = room[:, :, 1:5, 0].transpose(1, 2)
    for kernel, out, _ in torch_kernels.each(q, k, v, lse=lse):
        assert not problems(out, lse, ref), kernel
        lse.fill_(CANARY)
        assert (room == CANARY).all(), "memory beside lse was written"
    out = torch.full_like(out, CANARY)
    for entry in torch_kernels.entries:
        torch_kernels.bundle.attention(q, k, v, out, causal=torch_kernels.causal, variant=entry.id)
        assert not problems(out, None, ref), f"{entry.id}: without lse"


def test_t10_strides_beyond_32_bits(torch_kernels: Kernels) -> None:
    """Each tensor in turn with batches 2^31 + 64 elements apart, also LSE; then rows and heads far apart."""
    import torch

    t = torch_kernels
    stride = 2**31 + 64
    big = torch.empty(stride + 2**22, device="cuda", dtype=torch.float32)
    room = big.view(t.dtype)
    q, k, v = t.qkv(2, 140, 170, 4, 2)

    def far(x: Any, *strides: int) -> Any:
        return room.as_strided(x.shape, strides).copy_(x)

    t.check(far(q, stride, 4 * t.d, t.d, 1), k, v, "q")
    t.check(q, far(k, stride, 2 * t.d, t.d, 1), v, "k")
    t.check(q, k, far(v, stride, 2 * t.dv, t.dv, 1), "v")
    t.check(q, k, far(v, 170 * t.dv, t.dv, stride, 1), "v, heads")
    t.check(q, far(k, 2 * t.d, 2**24, t.d, 1), v, "k, rows")
    out = torch.empty(2, 140, 4, t.dv, device="cuda", dtype=t.dtype)
    t.check(q, k, v, "out", out=far(out, stride, 4 * t.dv, t.dv, 1))
    t.check(q, k, v, "lse", lse=big.as_strided((2, 4, 140), (stride, 140, 1)))


@pytest.mark.parametrize("case", ["t07 rows 9728 apart", "t09 25600 heads in all"])
def test_t07_t09_more_than_2_to_31_elements(bundle: Bundle, gpu: Device, case: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch to make and compare tensors")
    from tests.device.torch_reference import problems, reference

    kind: Kind = ("bf16", (64, 64), False)
    entries = [e for e in bundle.kernels if runs_on(e, gpu) and of_kind(e, kind)]
    if not entries:
        pytest.skip(f"the bundle has no {name_of(kind)}")
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free device memory")
    t = Kernels(bundle, kind, entries[:1])
    if case.startswith("t07"):
        rows = 230_000  # x 9728 = 2.237e9 elements
        q = torch.randn(1, rows, 9728, device="cuda", dtype=torch.bfloat16)[..., : 16 * 64].unflatten(2, (16, 64))
        room = torch.full((1, rows, 9728), CANARY, device="cuda", dtype=torch.bfloat16)
        out = room[..., : 16 * 64].unflatten(2, (16, 64))
        _, k, v = t.qkv(1, 1, 70, 16, 2)
        samples = [slice(0, 300), slice(220_600, 220_900), slice(rows - 300, rows)]  # around 2^31 / 9728
    else:
        q, k, v = t.qkv(1600, 16, 729, 16, 16)
        out, room, samples = None, None, [slice(0, 16)]
    for kernel, got, lse in t.each(q, k, v, out=out):
        for rows_of in samples:
            for b in (slice(0, 1), slice(q.shape[0] - 1, q.shape[0])):
                ref = reference(q[b, rows_of], k[b], v[b])
                assert not problems(got[b, rows_of], lse[b, :, rows_of], ref), f"{kernel}: {case}"
        assert not (got == CANARY).all(-1).any()
        assert room is None or (room[..., 16 * 64 :] == CANARY).all(), "memory beside out was written"


# ---- bits


def test_1000_launches_give_the_same_bits(torch_kernels: Kernels) -> None:
    import torch

    q, k, v = torch_kernels.qkv(2, 700, 650, 8, 2)
    for entry in torch_kernels.entries:
        options = {"causal": torch_kernels.causal, "variant": entry.id}
        outs = [torch.full((2, 700, 8, torch_kernels.dv), CANARY, device="cuda", dtype=q.dtype) for _ in range(2)]
        lses = [torch.full((2, 8, 700), CANARY, device="cuda") for _ in range(2)]
        torch_kernels.bundle.attention(q, k, v, outs[0], lse=lses[0], **options)
        different = torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(1000):
            outs[1].fill_(CANARY)
            torch_kernels.bundle.attention(q, k, v, outs[1], lse=lses[1], **options)
            different += (outs[0].view(torch.int16) != outs[1].view(torch.int16)).sum() + (lses[0] != lses[1]).sum()
        assert int(different) == 0, entry.id


def test_d02_a_sequence_has_the_same_bits_alone_and_in_a_batch(torch_kernels: Kernels) -> None:
    import torch

    q, k, v = torch_kernels.qkv(64, 130, 700, 4, 2)
    whole = [(out.clone(), lse.clone()) for _, out, lse in torch_kernels.each(q, k, v)]
    for b in (0, 31, 63):
        alone = torch_kernels.each(q[b : b + 1], k[b : b + 1], v[b : b + 1])
        for (kernel, out, lse), (want, want_lse) in zip(alone, whole, strict=True):
            assert torch.equal(out[0], want[b]) and torch.equal(lse[0], want_lse[b]), f"{kernel}: batch {b}"


@pytest.mark.parametrize("num_sms", [1, 7, 148, 1000])
def test_r11_any_grid_gives_the_same_bits(torch_kernels: Kernels, num_sms: int) -> None:
    import torch

    q, k, v = torch_kernels.qkv(2, 500, 300, 6, 2)
    default = [(out.clone(), lse.clone()) for _, out, lse in torch_kernels.each(q, k, v)]
    for (kernel, out, lse), (want, want_lse) in zip(torch_kernels.each(q, k, v, num_sms=num_sms), default, strict=True):
        assert torch.equal(out, want) and torch.equal(lse, want_lse), kernel
