"""Small hand-written PTX kernels for the simulator's own tests."""

from __future__ import annotations

import numpy as np

from fmha_gen.sim import GlobalMemory, Launch, run

HEADER = ".version 8.7\n.target sm_100a\n.address_size 64\n"
REGS = """
    .reg .pred %p<40>, p, q;
    .reg .b16 %h<20>;
    .reg .b32 %r<200>;
    .reg .b64 %rd<60>;
    .reg .f32 %f<20>;
"""


def kernel(body: str, params: str = "", dynamic: bool = False, name: str = "k") -> str:
    """A module with one entry. `params`: comma-separated ".param ..." declarations."""
    shared = ".extern .shared .align 1024 .b8 smem[];\n" if dynamic else ""
    return f"{HEADER}{shared}.visible .entry {name}({params})\n{{{REGS}\n{body}\n    ret;\n}}\n"


def execute(text: str, params=(), memory=None, grid=(1,), block=(32,), seed=0, profile="isa", **kwargs):
    """Run a PTX text and return the Result."""
    launch = Launch(text, grid=grid, block=block, params=list(params), **kwargs)
    return run(launch, memory or GlobalMemory(), seed=seed, profile=profile)


_TYPES = {16: ("b16", "%h", np.uint16), 32: ("b32", "%r", np.uint32), 64: ("b64", "%rd", np.uint64)}


def evaluate(code: str, inputs, out_bits: int = 32, in_bits=None):
    """Run `code` over arrays of bit patterns, one element per lane.

    `code` reads {a}, {b}, {c}, {d} (registers with the inputs) and writes {o}. Returns the outputs' bit patterns.
    """
    arrays = [np.ascontiguousarray(x) for x in inputs]
    in_bits = in_bits or [a.dtype.itemsize * 8 for a in arrays]
    n = arrays[0].size
    padded = -(-n // 32) * 32
    memory, params, decls, lines = GlobalMemory(), [], [], []
    lines.append("mov.u32 %r100, %ctaid.x;\nmov.u32 %r101, %tid.x;\nmad.lo.s32 %r102, %r100, 32, %r101;")
    names = {}
    for k, (array, bits) in enumerate(zip(arrays, in_bits, strict=True)):
        ty, prefix, dtype = _TYPES[bits]
        data = np.zeros(padded, dtype)
        data[:n] = array.view(dtype)
        data[n:] = data[0]
        params.append(memory.map(f"in{k}", data))
        decls.append(f".param .u64 in{k}")
        names["abcd"[k]] = f"{prefix}{10 + k}"
        lines.append(
            f"ld.param.u64 %rd{30 + k}, [in{k}];\nmul.wide.u32 %rd40, %r102, {bits // 8};\n"
            f"add.s64 %rd{30 + k}, %rd{30 + k}, %rd40;\nld.global.{ty} {prefix}{10 + k}, [%rd{30 + k}];"
        )
    ty, prefix, dtype = _TYPES[out_bits]
    out = np.zeros(padded, dtype)
    params.append(memory.map("out", out))
    decls.append(".param .u64 out")
    names["o"] = f"{prefix}15"
    lines.append(code.format(**names))
    lines.append(
        f"ld.param.u64 %rd41, [out];\nmul.wide.u32 %rd42, %r102, {out_bits // 8};\nadd.s64 %rd41, %rd41, %rd42;\n"
        f"st.global.{ty} [%rd41], {prefix}15;"
    )
    result = execute(kernel("\n".join(lines), ", ".join(decls)), params, memory, grid=(padded // 32,))
    result.raise_for_findings()
    return out[:n]


def kinds(result) -> set[str]:
    return {f.kind for f in result.findings}
