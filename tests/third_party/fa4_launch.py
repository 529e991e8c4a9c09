"""How flash-attn-4 (4.0.0b36, dense forward) is launched: parameters, tensor maps and grid, as its host packs them.

CuTe-DSL lowers kernel arguments in order: a coordinate tensor is its dynamic extents as int32, a memory tensor is
{pointer, extents int32, padding to 8, strides int64 in elements}, a TMA atom is a 128-byte tensor map, a divisor is 12
bytes {divisor, multiplier, shift1, shift2}; static values vanish.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from fmha_gen.reference import from_bits, round_to, to_bits
from fmha_gen.sim.tensormap import TensorMap
from fmha_gen.sim.umma import decode_operand

ADDRESSES = {
    "q": 0x7F10_0000_0000,
    "k": 0x7F20_0000_0000,
    "v": 0x7F30_0000_0000,
    "sink": 0x7F38_0000_0000,
    "out": 0x7F40_0000_0000,
    "lse": 0x7F50_0000_0000,
}
DYNAMIC_SMEM_BYTES = 232448  # the most that a block can have; flash-attn-4 asks for a little less
L2_SECTION_BYTES = 50 << 20


@dataclass(frozen=True)
class Build:
    """One compiled configuration. With a ratio above 1 the query heads of one key head share tiles (packed)."""

    head_dim_qk: int
    head_dim_v: int
    causal: bool
    num_heads_q: int = 4
    num_heads_kv: int = 4
    seqlen: int = 256  # what it was compiled for: up to 128 rows one query tile, up to 256 two, beyond maybe CTA pairs
    window: bool = False
    sink: bool = False
    softcap: float = 0.0
    dtype: str = "bf16"  # of q, k and v; "e4m3" gives bf16 output

    @property
    def ratio(self) -> int:
        return self.num_heads_q // self.num_heads_kv

    @property
    def tma_query(self) -> bool:
        """Whether Q and O move by TMA; a ratio that does not divide 128 leaves them to ordinary copies."""
        return 128 % self.ratio == 0

    @property
    def rows_per_tile(self) -> int:
        """Query rows of one CTA's tile."""
        return 128 if self.head_dim_v == 256 or self.seqlen * self.ratio <= 128 else 256

    @property
    def cluster(self) -> int:
        if self.head_dim_v == 256:
            return 2
        wide = (self.head_dim_qk, self.head_dim_v) in ((128, 128), (192, 128))
        return 2 if wide and not self.causal and self.seqlen * self.ratio > 256 else 1


@dataclass(frozen=True)
class Shape:
    """One problem: run-time values, and the number of multiprocessors the persistent grid is cut for."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_kv: int = 1
    num_sms: int = 148
    window: tuple[int, int] = (64, 16)  # of builds with a window


@dataclass
class Problem:
    """Arrays of a launch. q, k, v: float32, already rounded. memory: what is mapped, by name; out and lse poisoned."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    memory: dict[str, np.ndarray]

    def options(self, build: Build, shape: Shape) -> dict[str, object]:
        """Arguments of the reference beside q, k and v."""
        sink = from_bits(self.memory["sink"], "bf16") if build.sink else None
        window = shape.window if build.window else None
        return {"causal": build.causal, "window": window, "sink": sink, "softcap": build.softcap}

    @property
    def out(self) -> np.ndarray:
        return from_bits(self.memory["out"], "bf16")

    @property
    def lse(self) -> np.ndarray:
        return self.memory["lse"]


def make_problem(build: Build, shape: Shape, seed: int, scale: float = 1.0) -> Problem:
    """Normal inputs (queries times `scale`) in bf16; out is filled with NaN patterns and lse with NaN."""
    rng = np.random.default_rng(seed)
    heads_kv, heads_q = shape.num_heads_kv, shape.num_heads_kv * build.ratio
    shapes = [(shape.batch, shape.seqlen_q, heads_q, build.head_dim_qk)]
    shapes += [(shape.batch, shape.seqlen_k, heads_kv, dim) for dim in (build.head_dim_qk, build.head_dim_v)]
    drawn = [rng.normal(size=s) * factor for s, factor in zip(shapes, (scale, 1, 1), strict=True)]
    if build.dtype == "e4m3":
        values, stored = zip(*map(_to_e4m3, drawn), strict=True)
    else:
        values, stored = [round_to(x, "bf16") for x in drawn], [to_bits(x, "bf16") for x in drawn]
    q, k, v = values
    memory = dict(zip("qkv", stored, strict=True))
    if build.sink:
        memory["sink"] = to_bits(rng.normal(size=heads_q) + 2, "bf16")
    memory["out"] = np.full((*q.shape[:3], build.head_dim_v), 0x7FFF, np.uint16)
    memory["lse"] = np.full((shape.batch, heads_q, shape.seqlen_q), np.nan, np.float32)
    return Problem(q, k, v, memory)


def _to_e4m3(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values, codes) nearest to `x`, which is within the type's range."""
    codes = np.concatenate([np.arange(0x7F), np.arange(0x81, 0xFF)]).astype(np.uint8)
    table = decode_operand(codes, "e4m3")
    nearest = np.abs(x[..., None] - table).argmin(axis=-1)
    return table[nearest], codes[nearest]


def divisor(d: int) -> bytes:
    """FastDivmod's 12 bytes for division by multiplication (Granlund and Montgomery's unsigned form)."""
    bits = (d - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << bits) - d) // d + 1) & 0xFFFFFFFF
    return struct.pack("<IIBBxx", d, multiplier, min(bits, 1), max(bits - 1, 0))


def tensor_maps(build: Build, shape: Shape) -> list[TensorMap]:
    """Maps of q, k, v, out: dimensions (d, s, h, b), or (d, ratio, s, h, b) where query heads are packed."""

    def plain(name: str, dim: int, seqlen: int, heads: int, rows: int) -> TensorMap:
        if build.dtype == "e4m3" and name != "out":
            strides = (dim * heads, dim, dim * heads * seqlen)
            extents = (dim, seqlen, heads, shape.batch)
            return TensorMap("u8", ADDRESSES[name], extents, strides, (128, rows, 1, 1), swizzle="128B")
        width = 64 if dim % 64 == 0 else 32
        strides = (2 * dim * heads, 2 * dim, 2 * dim * heads * seqlen)
        return TensorMap("bf16", ADDRESSES[name], (dim, seqlen, heads, shape.batch), strides, (width, rows, 1, 1),
                         swizzle=f"{2 * width}B")  # fmt: skip

    def packed(name: str, dim: int) -> TensorMap:
        r, heads = build.ratio, shape.num_heads_kv * build.ratio
        strides = (2 * dim, 2 * dim * heads, 2 * dim * r, 2 * dim * heads * shape.seqlen_q)
        extents = (dim, r, shape.seqlen_q, shape.num_heads_kv, shape.batch)
        return TensorMap("bf16", ADDRESSES[name], extents, strides, (64, r, 128 // r, 1, 1), swizzle="128B")

    def query(name: str, dim: int) -> TensorMap:
        if build.ratio > 1:
            return packed(name, dim)
        return plain(name, dim, shape.seqlen_q, shape.num_heads_kv, 128)

    kv = (shape.seqlen_k, shape.num_heads_kv)
    return [
        query("q", build.head_dim_qk),
        plain("k", build.head_dim_qk, *kv, 128 // build.cluster),
        plain("v", build.head_dim_v, *kv, 128),
        query("out", build.head_dim_v),
    ]


def launch_parameters(build: Build, shape: Shape) -> tuple[list[bytes | int | float | TensorMap], int]:
    """(kernel parameters in order, grid x)."""
    b, sq, sk, h, r = shape.batch, shape.seqlen_q, shape.seqlen_k, shape.num_heads_kv, build.ratio
    d, dv = build.head_dim_qk, build.head_dim_v
    maps = tensor_maps(build, shape)
    if build.tma_query:
        query, out = struct.pack("<4i", sq, d, h, b), struct.pack("<4i", sq, dv, h, b)
    else:
        query, out, maps = _query_tensor("q", d, build, shape), _query_tensor("out", dv, build, shape), maps[1:3]
    lse = struct.pack("<Q3i4x", ADDRESSES["lse"], sq, h, b)
    lse += struct.pack("<2q", sq, h * sq) if r == 1 else struct.pack("<3q", sq, r * sq, h * r * sq)
    params: list[bytes | int | float | TensorMap] = [query, struct.pack("<4i", sk, d, h, b)]
    params += [struct.pack("<4i", dv, sk, h, b), out, lse, *maps]
    scale, log2e = 1 / math.sqrt(d), math.log2(math.e)
    params += [log2e, scale] if build.softcap else [scale * log2e]
    if build.window:
        params += list(shape.window)
    if build.sink:
        params.append(struct.pack("<Qi4x", ADDRESSES["sink"], h * r))
    params += [bytes(64 if build.cluster == 2 else 32)] * 2
    num_block = -(-sq * r // build.rows_per_tile)
    longest_first = build.causal or build.window
    scheduler, grid = (_longest_first if longest_first else _static_persistent)(build, shape, num_block)
    params += scheduler
    if r > 1:
        params += [divisor(r), r]
    return params, grid


def _query_tensor(name: str, dim: int, build: Build, shape: Shape) -> bytes:
    """Q or O as a packed memory tensor ((ratio, seqlen), dim, heads, batch); strides of ratio, seqlen, heads, batch."""
    r, heads = build.ratio, shape.num_heads_kv
    extents = struct.pack("<4i", shape.seqlen_q, dim, heads, shape.batch)
    row = dim * heads * r
    return struct.pack("<Q", ADDRESSES[name]) + extents + struct.pack("<4q", dim, row, r * dim, row * shape.seqlen_q)


def _static_persistent(build: Build, shape: Shape, num_block: int) -> tuple[list[bytes | int | float | TensorMap], int]:
    blocks = -(-num_block // build.cluster)
    total = blocks * shape.num_heads_kv * shape.batch
    grid = min(total, shape.num_sms // build.cluster) * build.cluster
    return [divisor(blocks), blocks, divisor(shape.num_heads_kv), shape.num_heads_kv, total, build.cluster], grid


def _longest_first(build: Build, shape: Shape, num_block: int) -> tuple[list[bytes | int | float | TensorMap], int]:
    heads, batch = shape.num_heads_kv, shape.batch
    one_head = shape.seqlen_k * (build.head_dim_qk + build.head_dim_v) * 2
    section = 1 << max(L2_SECTION_BYTES // one_head, 1).bit_length() - 1
    total = num_block * heads * batch
    pairs = [heads, section, section * num_block, max(heads * batch % section, 1)]
    out: list[bytes | int | float | TensorMap] = [total, 1, num_block, heads, batch, section]
    for value in pairs:
        out += [divisor(value), value]
    return [*out, heads * batch // section, divisor(1), 1, 1], total
