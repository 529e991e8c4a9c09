"""Compile flash-attn-4's sm_100 forward for one configuration, without a GPU, and write its PTX.

Runs under the interpreter that has flash-attn-4 (it needs torch and its own CuTe-DSL), not under ours:

    PYTHON fa4_compile.py OUTPUT.ptx '{"head_dim_qk": 128, "head_dim_v": 128, "causal": false, "num_heads_q": 4,
                                       "num_heads_kv": 4, "seqlen": 256}'

seqlen only steers flash-attn-4's choice of configuration (one or two query tiles, CTA pairs); lengths, heads, batch and
window of the compiled kernel are run-time values. Optional keys: "window" (bool), "sink" (bool), "softcap" (value),
"dtype" ("bf16" or "e4m3").
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

NUM_SMS = 148  # of a B200: flash-attn-4 asks the device, and there is none


class _Device:
    """Stands in for cutlass.utils.HardwareInfo, which needs a driver."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def get_device_multiprocessor_count(self) -> int:
        return NUM_SMS

    def get_max_active_clusters(self, cluster_size: int = 1, *_args: object, **_kwargs: object) -> int:
        return NUM_SMS // cluster_size

    def get_l2_cache_size_in_bytes(self) -> int:
        return 126 << 20


def main(output: str, config: dict[str, Any]) -> None:
    dump = tempfile.mkdtemp(prefix="fa4-")
    os.environ.update(
        CUTE_DSL_ARCH="sm_100a", CUTE_DSL_KEEP="ptx", CUTE_DSL_DUMP_DIR=dump,
        FLASH_ATTENTION_ARCH="sm_100", FLASH_ATTENTION_NUM_SMS=str(NUM_SMS),
    )  # fmt: skip
    os.chdir(dump)
    warnings.filterwarnings("ignore")
    import cutlass.utils
    import cutlass.utils.hardware_info
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    cutlass.utils.HardwareInfo = cutlass.utils.hardware_info.HardwareInfo = _Device
    from flash_attn.cute.interface import _flash_attn_fwd

    failure: Exception | None = None
    dtype = torch.float8_e4m3fn if config.get("dtype") == "e4m3" else torch.bfloat16
    kind = {"dtype": dtype, "device": "cuda"}
    with FakeTensorMode():
        q = torch.empty(2, config["seqlen"], config["num_heads_q"], config["head_dim_qk"], **kind)
        k = torch.empty(2, config["seqlen"], config["num_heads_kv"], config["head_dim_qk"], **kind)
        v = torch.empty(2, config["seqlen"], config["num_heads_kv"], config["head_dim_v"], **kind)
        options: dict[str, object] = {}
        if config.get("window"):
            options.update(window_size_left=64, window_size_right=16)
        if config.get("sink"):
            options.update(learnable_sink=torch.empty(config["num_heads_q"], dtype=torch.bfloat16, device="cuda"))
        if config.get("softcap"):
            options.update(softcap=float(config["softcap"]))
        try:
            _flash_attn_fwd(q, k, v, causal=bool(config["causal"]), _arch=100, return_lse=True, **options)
        except Exception as error:  # what follows the compilation wants a device; the PTX decides
            failure = error
    found = sorted(Path(dump).rglob("*.ptx"))
    if len(found) != 1:
        raise SystemExit(f"{len(found)} PTX files after compiling {config}; {type(failure).__name__}: {failure}")
    shutil.copyfile(found[0], output)
    shutil.rmtree(dump)


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()), json.loads(sys.argv[2]))
