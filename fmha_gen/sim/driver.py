"""The launcher's driver protocol on the simulator: same selection, same packed arguments, no GPU.

    driver = SimDriver()
    bundle = Bundle.open(path, driver)
    q = driver.place("q", q_bits, "bf16")          # and k, v, out, lse
    bundle.attention(q, k, v, out, lse=lse)
    driver.last_result.counters

A launch runs to its end before it returns. Errors that the simulator finds raise SimError; warnings stay in
`last_result`.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BundleError, ProblemError, SimError
from ..manifest import KernelRecord
from ..runtime.driver import ADDRESS_ORDER, ARCH_CAPABILITY, Addresses, Device, PackedLaunch, TensorMapArgs
from ..runtime.tensors import HOST, TensorArg
from .findings import Finding, Result
from .launch import Launch, Param, prepare, run
from .memory import GlobalMemory
from .tensormap import TensorMap, TensorMapError

NUM_SMS = 148  # of a B200
MAX_DYNAMIC_SMEM_BYTES = 232448
_ELEMENTS = {"bf16": "bf16", "fp16": "f16"}


class Lines:
    """PTX line -> (source file, line), from a bundle's line map; empty without one."""

    def __init__(self, line_map: Mapping[str, Any] | None) -> None:
        data = {"files": [], "spans": []} if line_map is None else line_map
        self._files: list[str] = data["files"]
        self._spans: list[list[int]] = data["spans"]

    def find(self, ptx_line: int) -> tuple[str, int] | None:
        at = bisect.bisect_right(self._spans, ptx_line, key=lambda span: span[0]) - 1
        if at < 0 or not self._spans[at][2]:
            return None
        return self._files[self._spans[at][1]], self._spans[at][2]


@dataclass(frozen=True)
class SimKernel:
    """A kernel ready to run: its PTX, and what a launch needs of its record and plan.

    planned_registers: warp -> per thread.
    """

    id: str
    ptx: str
    symbol: str
    registers: int
    roles: Mapping[int, str]
    planned_registers: Mapping[int, int]
    where: str


class SimDriver:
    """`fmha_gen.runtime.driver.Driver` on the simulator. One launch at a time; not for use from several threads.

    num_sms: what the device reports, so what grids are laid out for (None: a B200's 148). seed: of the scheduler.
    profile: ``isa`` or ``scoreboard``. ctas: run only these CTAs of a grid. strict: raise SimError at findings.
    """

    image = "ptx"

    def __init__(
        self, num_sms: int | None = None, seed: int = 0, profile: str = "isa", arch: str = "sm_100a",
        ctas: Sequence[int] | None = None, strict: bool = True,
    ) -> None:  # fmt: skip
        if arch not in ARCH_CAPABILITY:
            raise SimError(f"arch {arch!r}: unknown; known are {', '.join(ARCH_CAPABILITY)}")
        sms = NUM_SMS if num_sms is None else num_sms
        self._device = Device(0, "simulator", ARCH_CAPABILITY[arch], sms, MAX_DYNAMIC_SMEM_BYTES)
        self.seed, self.profile, self.ctas, self.strict = seed, profile, ctas, strict
        self.memory = GlobalMemory()
        self.last_result: Result | None = None

    def place(
        self, name: str, array: NDArray[Any], dtype: str | None = None, address: int | None = None,
        writable: bool | None = None,
    ) -> TensorArg:  # fmt: skip
        """Map a C-contiguous array into simulated memory and describe it as a tensor.

        The array itself is used: what the kernel writes appears in it. dtype: ``bf16`` or ``fp16`` for uint16 bit
        patterns. address: where, 256-aligned and away from others by default. writable: only out and lse by default.
        Views with other strides: `dataclasses.replace` the result's shape, strides or address.
        """
        kind = dtype if array.dtype == np.uint16 and dtype else {"float32": "float32"}.get(str(array.dtype))
        if kind is None:
            raise ProblemError(f"{name}: dtype {array.dtype}; pass uint16 bit patterns and their dtype, or float32")
        can_write = name.partition(" ")[0] in ("out", "lse") if writable is None else writable
        at = self.memory.map(name, array, address, can_write)
        return TensorArg.contiguous(at, array.shape, kind, HOST)

    def reset(self, seed: int = 0, num_sms: int | None = None) -> None:
        """Forget all memory and take another scheduler seed, and another multiprocessor count if given."""
        self.seed = seed
        self.memory, self.last_result = GlobalMemory(), None
        self._device = dataclasses.replace(self._device, num_sms=NUM_SMS if num_sms is None else num_sms)

    # ---- the protocol

    def check_version(self, min_driver: int, where: str) -> None:
        """The simulator has no driver version."""

    def device(self, ordinal: int) -> Device:
        """The one simulated device."""
        if ordinal not in (0, HOST):
            raise SimError(f"device {ordinal}: the simulator has device 0 only")
        return self._device

    def device_of(self, tensors: Mapping[str, TensorArg]) -> Device:
        """The simulated device; tensors must have been placed."""
        for name, t in tensors.items():
            if t.device not in (HOST, None):
                raise ProblemError(f"{name}: on cuda:{t.device}; the simulator needs host arrays: SimDriver.place() it")
        return self._device

    def load(
        self,
        record: KernelRecord,
        image: bytes,
        device: Device,
        where: str,
        line_map: Mapping[str, Any] | None,
        plan: Mapping[str, Any] | None,
    ) -> SimKernel:
        """Parse and translate a kernel's PTX. Raises BundleError: no PTX; SimError: no plan, or not modelled."""
        if plan is None:
            raise SimError(
                f"{where}: came without its plan, which the registers are checked against; pass read_plan()'s"
            )
        try:
            ptx = image.decode("ascii")
        except UnicodeDecodeError:
            raise BundleError(f"{where}: is no PTX text; rebuild the bundle") from None
        lines = Lines(line_map)
        roles, planned = roles_of(plan), planned_registers(plan)
        kernel = SimKernel(record.id, ptx, record.symbol, record.resources.registers, roles, planned, where)
        program = prepare(Launch(ptx, (1,), (record.launch.threads,), (), entry=record.symbol))
        for ins in program.kernel.instrs:  # reports name source lines, although the PTX has no debug information
            if ins.loc is None:
                ins.loc = lines.find(ins.line)
        return kernel

    def bind(self, kernel: SimKernel, packed: PackedLaunch, device: Device) -> SimLaunch:
        """A launch with these arguments. Raises SimError for a tensor map that the driver would refuse."""
        launch = Launch(
            ptx=kernel.ptx,
            entry=kernel.symbol,
            grid=packed.grid,
            block=packed.block,
            cluster=packed.cluster,
            dynamic_smem_bytes=packed.dynamic_smem_bytes,
            params=[_param(kernel, arg) for arg in packed.args],
            registers=kernel.registers,
            roles=dict(kernel.roles),
        )
        return SimLaunch(self, kernel, packed, device, launch)

    def execute(self, kernel: SimKernel, launch: Launch) -> None:
        """Run to the end. Raises SimError with every error that was found, unless not strict."""
        result = run(launch, self.memory, self.seed, self.profile, self.ctas)
        self.last_result = result
        _check_registers(result, kernel)
        if self.strict and not result.ok:
            found = "\n".join(f"  {line}" for line in summary(result.errors))
            raise SimError(f"{kernel.id}: seed {self.seed}: {len(result.errors)} errors in {kernel.where}:\n{found}")


class SimLaunch:
    """A launch in the simulator; the stream is ignored, since every launch ends before it returns."""

    def __init__(
        self, driver: SimDriver, kernel: SimKernel, packed: PackedLaunch, device: Device, launch: Launch
    ) -> None:
        self._driver, self._kernel, self._packed, self._device = driver, kernel, packed, device
        self.launch = launch

    def __call__(self, stream: int) -> None:
        self._check_placed()
        self._driver.execute(self._kernel, self.launch)

    def _check_placed(self) -> None:
        """Raise ProblemError for a tensor that starts outside the simulator's memory, as any host array does."""
        for name, kind, arg in zip(self._packed.names, self._packed.kinds, self._packed.args, strict=True):
            if isinstance(arg, TensorMapArgs):
                name, address, empty = arg.memory, arg.address, 0 in arg.extents
            else:
                address, empty = (int(arg), False) if kind == "pointer" else (0, True)
            if address and not empty and not self._driver.memory.holds(address):
                raise ProblemError(
                    f"{name}: {address:#x} is no memory of the simulator; place() it: "
                    f"{name} = driver.place({name!r}, array, dtype)"
                )

    def launch_at(self, addresses: Addresses, stream: int) -> None:
        """`rebind` for one call."""
        self.rebind(addresses)(stream)

    def rebind(self, addresses: Addresses) -> SimLaunch:
        """The same launch on tensors of the same geometry at other addresses."""
        packed = self._packed
        at = dict(zip(ADDRESS_ORDER, addresses, strict=True))
        args = tuple(
            arg._replace(address=at[arg.memory])
            if isinstance(arg, TensorMapArgs)
            else at[name]
            if kind == "pointer" and arg
            else arg
            for name, kind, arg in zip(packed.names, packed.kinds, packed.args, strict=True)
        )
        return self._driver.bind(self._kernel, packed._replace(args=args), self._device)


def _param(kernel: SimKernel, arg: TensorMapArgs | int | float) -> Param:
    if not isinstance(arg, TensorMapArgs):
        return arg
    try:
        return TensorMap(
            element=_ELEMENTS[arg.element],
            address=arg.address,
            extents=arg.extents,
            strides_bytes=arg.strides_bytes,
            box=arg.box,
            swizzle=arg.swizzle,
            fill=arg.fill,
        )
    except TensorMapError as e:
        raise SimError(f"{kernel.id}: {arg.tensor}: tensor map: {e}") from None


def _check_registers(result: Result, kernel: SimKernel) -> None:
    """Warps must end with the registers that the plan gives their role: its budget was solved for these."""
    for warp, counts in sorted(result.registers.items()):
        planned = kernel.planned_registers[warp]
        wrong = sorted(counts - {planned})
        if wrong:
            role = kernel.roles.get(warp, "")
            text = f"ends with {wrong[0]} registers per thread, the plan gives its role {planned}: setmaxnreg is wrong"
            result.findings.append(Finding("setmaxnreg-plan", text, "error", -1, warp, role, 0, None, ""))


def summary(findings: Sequence[Finding]) -> list[str]:
    """One line per kind, role and source line: an unrolled loop reports one mistake at each of its instructions."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for f in findings:
        groups.setdefault((f.kind, f.role.rstrip("01"), f.loc or f.line), []).append(f)
    more = {key: f" (and at {len(group) - 1} more instructions of this line)" for key, group in groups.items()}
    return [f"{group[0]}{more[key] if len(group) > 1 else ''}" for key, group in groups.items()]


def roles_of(plan: Mapping[str, Any]) -> dict[int, str]:
    """Warp -> role name, from the kernel's plan."""
    return {warp: role["name"] for role in plan["roles"] for warp in role["warp_ids"]}


def planned_registers(plan: Mapping[str, Any]) -> dict[int, int]:
    """Warp -> registers per thread after setmaxnreg, from the kernel's plan."""
    return {warp: role["num_regs"] for role in plan["roles"] for warp in role["warp_ids"]}


def counters(result: Result) -> dict[str, Any]:
    """Executed warp instructions as JSON: by role, and per role and innermost-or-outer loop of the PTX.

    Loops carry the PTX line of their header, how often the header ran (summed over warps and CTAs), the instructions
    inside (with and without inner loops), and per iteration.
    """
    c = result.counters
    return {
        "unit": "warp instructions of PTX, summed over warps and CTAs",
        "roles": dict(c.roles),
        "opcodes": {role: dict(sorted(ops.items())) for role, ops in c.opcodes.items()},
        "loops": {
            role: [
                {
                    "ptx_line": loop.line, "source": None if loop.loc is None else f"{loop.loc[0]}:{loop.loc[1]}",
                    "depth": loop.depth, "warps": loop.warps, "iterations": loop.iterations,
                    "instructions": loop.instructions, "own_instructions": loop.own,
                    "per_iteration": round(loop.per_iteration, 3), "opcodes": dict(sorted(loop.by_opcode.items())),
                }
                for loop in loops
            ]
            for role, loops in c.loops.items()
        },
    }  # fmt: skip


__all__ = ["SimDriver", "SimKernel", "SimLaunch", "counters", "roles_of", "summary"]
