"""A warp's register file, and the generic address windows of state spaces that are not global memory.

The header holds the pointer to the parameters, CTA addresses and special registers. A 32-bit register is 32 consecutive
words; a 64-bit one is a plane of 32 low and a plane of 32 high words; a 16-bit one is 32 half words; a predicate is one
word, a bit per lane.
"""

from __future__ import annotations

# Register-file header: byte offsets.
PARAM_POINTER = 0
SHARED_BASE = 8  # u32: shared address of this CTA's byte 0, cluster rank in bits 24+
SPECIALS_OFFSET = 64
SPECIAL_REGISTERS = (
    "%tid.x", "%tid.y", "%tid.z", "%ntid.x", "%ntid.y", "%ntid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
    "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid",
    "%clusterid.x", "%clusterid.y", "%clusterid.z", "%nclusterid.x", "%nclusterid.y", "%nclusterid.z",
    "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_ctaid.z", "%cluster_nctaid.x", "%cluster_nctaid.y",
    "%cluster_nctaid.z", "%cluster_ctarank", "%cluster_nctarank", "%lanemask_eq", "%lanemask_le", "%lanemask_lt",
    "%lanemask_ge", "%lanemask_gt", "%dynamic_smem_size", "%total_smem_size", "%is_explicit_cluster",
)  # fmt: skip
SPECIAL_OFFSETS = {name: SPECIALS_OFFSET + 128 * i for i, name in enumerate(SPECIAL_REGISTERS)}
SPECIAL_OFFSETS["%tid"] = SPECIAL_OFFSETS["%tid.x"]
HEADER_BYTES = SPECIALS_OFFSET + 64 + 128 * len(SPECIAL_REGISTERS)

# Generic address windows
SHARED_WINDOW = 0x7E00_0000_0000
PARAM_WINDOW = 0x7D00_0000_0000
LOCAL_WINDOW = 0x7C00_0000_0000
WINDOW_BYTES = 0x0100_0000_0000


def reg_bytes(width: int) -> int:
    return 64 if width <= 16 else 4 * width
