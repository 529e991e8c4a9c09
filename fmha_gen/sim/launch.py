"""The public entry: a launch description, and `run`."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import SimError
from .findings import Fault, Result
from .machine import MAX_SMEM_BYTES, POOL_REGISTERS, Cluster, Cta, Geometry, Machine, Params
from .memory import GlobalMemory
from .ops import bind
from .program import Program, load
from .ptx import Kernel, ParamDecl
from .tensormap import PARAM_BYTES, TensorMap
from .warp import Warp

PROFILES = ("isa", "scoreboard")
SM_COUNT = 148
Special = int | NDArray[np.uint32]
Param = bytes | int | float | TensorMap


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    ptx: PTX text; entry: kernel name (None: the only one). grid, block: dimensions (missing ones are 1).
    cluster: CTAs per cluster (None: what the PTX says, else 1). dynamic_smem_bytes: as given to the driver.
    params: one per kernel parameter: bytes of its size, an int, a float (f32 or f64), or a TensorMap.
    registers: per thread at launch (None: .maxnreg, or 65536 / threads rounded down to 8, at most 255).
    roles: warp id -> name, for reports and counters.
    """

    ptx: str
    grid: Sequence[int]
    block: Sequence[int]
    params: Sequence[Param]
    entry: str | None = None
    cluster: Sequence[int] | None = None
    dynamic_smem_bytes: int = 0
    registers: int | None = None
    roles: Mapping[int, str] = field(default_factory=dict)


def _dims(values: Sequence[int], what: str) -> tuple[int, int, int]:
    out = tuple(int(v) for v in values) + (1,) * (3 - len(values))
    if len(out) != 3 or any(v < 1 for v in out):
        raise SimError(f"launch {what} {tuple(values)}: up to three positive dimensions are needed")
    return out[0], out[1], out[2]


def pack_params(kernel: Kernel, params: Sequence[Param]) -> Params:
    """Kernel parameters as the driver lays them out. Raises SimError for a wrong number, size or value."""
    if len(params) != len(kernel.params):
        raise SimError(f"launch of {kernel.name}: {len(params)} parameters; the kernel has {len(kernel.params)}")
    data = np.zeros(max(1, kernel.param_bytes), np.uint8)
    maps: dict[int, TensorMap] = {}
    for number, (decl, value) in enumerate(zip(kernel.params.values(), params, strict=True)):
        raw = _param_bytes(number, decl, value)
        if isinstance(value, TensorMap):
            maps[decl.offset] = value
        data[decl.offset : decl.offset + decl.size] = np.frombuffer(raw, np.uint8)
    return Params(data, maps)


def _param_bytes(number: int, decl: ParamDecl, value: Param) -> bytes:
    where = f"parameter {number} ({decl.name.rsplit('_param_')[-1]}, .{decl.type}, {decl.size} bytes)"
    if isinstance(value, TensorMap):
        if decl.size != PARAM_BYTES or decl.align % 64:
            raise SimError(f"{where}: a tensor map needs {PARAM_BYTES} bytes aligned to 64")
        return b"\xa5" * PARAM_BYTES
    if isinstance(value, float):
        if decl.size not in (4, 8):
            raise SimError(f"{where}: a float needs 4 or 8 bytes")
        return struct.pack("<f" if decl.size == 4 else "<d", value)
    if isinstance(value, bool | int | np.integer):
        if not -(1 << (8 * decl.size - 1)) <= int(value) < 1 << (8 * decl.size):
            raise SimError(f"{where}: {value} does not fit")
        return (int(value) & ((1 << 8 * decl.size) - 1)).to_bytes(decl.size, "little")
    raw = bytes(value)
    if len(raw) != decl.size:
        raise SimError(f"{where}: {len(raw)} bytes given")
    return raw


def launch_registers(launch: Launch, kernel: Kernel, threads: int) -> int:
    """Registers per thread at launch. Raises SimError when they exceed the register file."""
    regs = launch.registers or kernel.maxnreg or min(255, POOL_REGISTERS // threads // 8 * 8)
    rounded = -(-regs // 8) * 8
    warps = -(-threads // 32)
    if rounded * 32 * warps > POOL_REGISTERS:
        raise SimError(f"launch of {kernel.name}: {rounded} registers x {32 * warps} threads = {rounded * 32 * warps} "
                       f"exceed the {POOL_REGISTERS} of a multiprocessor")  # fmt: skip
    return rounded


def prepare(launch: Launch) -> Program:
    """Parse and translate the kernel (cached). Raises SimError naming everything that is not modelled."""
    return load(launch.ptx, launch.entry, bind)


def run(launch: Launch, memory: GlobalMemory, seed: int = 0, profile: str = "isa", ctas: Sequence[int] | None = None,
        max_steps: int = 2_000_000_000) -> Result:  # fmt: skip
    """Execute a launch (or only the CTAs, with clusters the clusters, numbered in `ctas`) and report.

    seed: of the scheduler and all delays; a correct kernel gives the same bits for every seed.
    profile: "isa" makes every wait and fence that the PTX ISA asks for an error when missing; "scoreboard" makes those
    that hardware register dependencies cover warnings.
    Raises SimError for misuse and for what is not modelled; whatever the kernel does wrong is in the Result.
    """
    if profile not in PROFILES:
        raise SimError(f"profile {profile!r}: one of {', '.join(PROFILES)} is needed")
    program = prepare(launch)
    kernel = program.kernel
    grid, block = _dims(launch.grid, "grid"), _dims(launch.block, "block")
    cluster = _dims(launch.cluster or kernel.cluster or (1, 1, 1), "cluster")
    threads = block[0] * block[1] * block[2]
    if kernel.reqntid and _dims(kernel.reqntid, "reqntid") != block:
        raise SimError(f"launch of {kernel.name}: block {block}; the kernel requires {kernel.reqntid}")
    if threads > 1024 or any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise SimError(
            f"launch of {kernel.name}: block {block} or grid {grid} with cluster {cluster} is not launchable"
        )
    smem_bytes = program.dynamic_smem_offset + launch.dynamic_smem_bytes
    if smem_bytes > MAX_SMEM_BYTES:
        raise SimError(f"launch of {kernel.name}: {smem_bytes} bytes of shared memory (1024 system + "
                       f"{smem_bytes - 1024}); {MAX_SMEM_BYTES} exist")  # fmt: skip
    packed = pack_params(kernel, launch.params)
    geometry = Geometry(grid, block, cluster, smem_bytes, launch_registers(launch, kernel, threads))
    machine = Machine(program, memory, packed, geometry, dict(launch.roles), seed, profile == "isa", max_steps)
    count = grid[0] * grid[1] * grid[2] // (cluster[0] * cluster[1] * cluster[2])
    chosen = range(count) if ctas is None else ctas
    fault = None
    try:
        for number in chosen:
            machine.run_cta(number, make_cluster)
    except Fault as e:
        fault = machine.fault(e)
    result = machine.result()
    if fault is not None:
        result.fault = fault
        result.findings.append(fault)
    return result


def make_cluster(machine: Machine, number: int) -> Cluster:
    """Cluster `number` of the grid with all its warps at the kernel's first instruction."""
    cluster = Cluster(machine, number)
    dims = machine.cluster_dims
    per = tuple(g // c for g, c in zip(machine.grid, dims, strict=True))
    corner = (number % per[0], number // per[0] % per[1], number // (per[0] * per[1]))
    for rank in range(machine.cluster_size):
        inside = (rank % dims[0], rank // dims[0] % dims[1], rank // (dims[0] * dims[1]))
        coords = tuple(k * d + i for k, d, i in zip(corner, dims, inside, strict=True))
        linear = coords[0] + machine.grid[0] * (coords[1] + machine.grid[1] * coords[2])
        cta = Cta(machine, cluster, linear, coords, rank)  # type: ignore[arg-type]
        cluster.ctas.append(cta)
        _add_warps(machine, cta, _cta_specials(machine, cta, inside, corner, per))
    return cluster


def _cta_specials(
    machine: Machine, cta: Cta, inside: tuple[int, ...], corner: tuple[int, ...], clusters: tuple[int, ...]
) -> dict[str, Special]:
    """Special registers that all warps of a CTA share."""
    lane = np.arange(32, dtype=np.uint32)
    bit = np.uint32(1) << lane
    out: dict[str, Special] = {
        "%laneid": lane,
        "%nwarpid": machine.warps_per_cta,
        "%smid": cta.number % SM_COUNT,
        "%nsmid": SM_COUNT,
        "%cluster_ctarank": cta.rank,
        "%cluster_nctarank": machine.cluster_size,
        "%is_explicit_cluster": int(machine.cluster_size > 1),
        "%dynamic_smem_size": machine.smem_bytes - machine.program.dynamic_smem_offset,
        "%total_smem_size": machine.smem_bytes,
        "%lanemask_eq": bit,
        "%lanemask_lt": bit - 1,
        "%lanemask_le": bit | (bit - 1),
        "%lanemask_gt": ~(bit | (bit - 1)),
        "%lanemask_ge": ~(bit - 1),
    }
    dims = {
        "%ntid": machine.block,
        "%ctaid": cta.coords,
        "%nctaid": machine.grid,
        "%clusterid": corner,
        "%nclusterid": clusters,
        "%cluster_ctaid": inside,
        "%cluster_nctaid": machine.cluster_dims,
    }
    return out | {f"{name}.{axis}": values[k] for name, values in dims.items() for k, axis in enumerate("xyz")}


def _add_warps(machine: Machine, cta: Cta, specials: dict[str, Special]) -> None:
    threads = machine.threads
    bx, by = machine.block[0], machine.block[1]
    for index in range(machine.warps_per_cta):
        lanes = min(32, threads - 32 * index)
        role = machine.roles.get(index, "")
        w = Warp(cta, index, lanes, machine.program, cta.cluster.comps, role)
        tid = np.arange(32 * index, 32 * index + 32, dtype=np.uint32)
        mine: dict[str, Special] = {
            "%warpid": index,
            "%tid.x": tid % bx,
            "%tid.y": tid // bx % by,
            "%tid.z": tid // (bx * by),
        }
        w.set_header(machine.params.data.ctypes.data, cta.rank << 24, specials | mine)
        w.num_regs = machine.registers
        w.stall = machine.rng.choice((0.0, 0.0, 0.0, 0.0, 0.03, 0.3))
        cta.warps.append(w)
        cta.live += 1
