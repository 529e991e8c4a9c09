"""The packer: parameter values by hand, strides as engines give them. Case ids refer to public reports."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from fmha_gen import manifest as m
from fmha_gen.errors import BundleError, ProblemError, SelectionError
from fmha_gen.runtime import TensorArg
from fmha_gen.runtime.driver import PackedLaunch, TensorMapArgs
from fmha_gen.runtime.pack import pack
from fmha_gen.runtime.problem import Launch, describe_launch
from tests.launcher_fixtures import make_record

FULL = make_record()[0]
CAUSAL = make_record(mask="causal")[0]


def launch(
    batch: int = 2, sq: int = 300, sk: int = 500, hq: int = 8, hkv: int = 2, dims: tuple[int, int] = (128, 128),
    dtype: str = "bf16", **changes: Any,
) -> Launch:  # fmt: skip
    shapes = {"q": (batch, sq, hq, dims[0]), "k": (batch, sk, hkv, dims[0]), "v": (batch, sk, hkv, dims[1]),
              "out": (batch, sq, hq, dims[1])}  # fmt: skip
    named = {n: TensorArg.contiguous(0x1000000 * (i + 1), s, dtype, 0) for i, (n, s) in enumerate(shapes.items())}
    return describe_launch(**(named | changes))


def packed(record: m.KernelRecord, given: Launch, num_sms: int = 148) -> PackedLaunch:
    out = pack(record, given, num_sms)
    assert out is not None
    return out


def by_name(p: PackedLaunch) -> dict[str, Any]:
    return dict(zip(p.names, p.args, strict=True))


def test_every_argument_of_a_dense_launch_by_hand() -> None:
    lse = TensorArg.contiguous(0x900000, (2, 8, 300), "float32", 0)
    p = packed(FULL, launch(lse=lse))
    args = by_name(p)
    assert args.pop("tma_q") == TensorMapArgs(
        tensor="q", memory="q", element="bf16", address=0x1000000, extents=(128, 300, 8, 2),
        strides_bytes=(8 * 128 * 2, 128 * 2, 300 * 8 * 128 * 2), box=(64, 128, 1, 1), swizzle="128B", fill="zero",
        l2_promotion="256B",
    )  # fmt: skip
    assert args.pop("tma_k").extents == (128, 500, 2, 2)
    assert args.pop("tma_v").strides_bytes == (2 * 128 * 2, 256, 500 * 2 * 128 * 2)
    assert args.pop("tma_o").address == 0x4000000
    scale = args.pop("softmax_scale_log2")
    assert scale == pytest.approx(math.log2(math.e) / math.sqrt(128), rel=1e-15)
    assert args == {
        "lse": 0x900000, "lse_stride_b": 2400, "lse_stride_h": 300, "lse_stride_s": 1, "batch": 2, "num_heads_q": 8,
        "num_heads_kv": 2, "seqlen_q": 300, "seqlen_k": 500,
    }  # fmt: skip
    assert (p.grid, p.block, p.cluster, p.dynamic_smem_bytes) == ((32, 1, 1), (512, 1, 1), (1, 1, 1), 200704)


def test_no_lse_is_a_null_pointer_not_a_variant() -> None:
    args = by_name(packed(FULL, launch()))
    assert [args[n] for n in ("lse", "lse_stride_b", "lse_stride_h", "lse_stride_s")] == [0, 0, 0, 0]


def test_t02_each_tensor_walks_its_own_strides() -> None:
    """T02: K is every second row of a larger buffer, V a transposed view, Q a slice of fused QKV, out padded."""
    strides = {"q": (300 * 3072, 3072, 128, 1), "k": (1000 * 512, 512, 128, 1), "v": (128000, 128, 64000, 1),
               "out": (300 * 1032, 1032, 128, 1)}  # fmt: skip
    base = launch()
    given = describe_launch(**{n: dataclasses.replace(t, strides=strides[n]) for n, t in base.tensors.items()})
    args = by_name(packed(FULL, given))
    for name, t in (("tma_q", "q"), ("tma_k", "k"), ("tma_v", "v"), ("tma_o", "out")):
        b, s, h, _ = strides[t]
        assert args[name].strides_bytes == (2 * s, 2 * h, 2 * b), name


@pytest.mark.parametrize("odd", [0, 1, 7, 2**40, -3])
def test_t04_size_1_axes_get_a_legal_stride(odd: int) -> None:
    """T04: B1, H1 and S1 alone and together; the stride that a framework left there never reaches the driver."""
    for axes in ((0,), (1,), (2,), (0, 1, 2)):
        shape = [2, 300, 2, 128]
        strides = [300 * 256, 256, 128, 1]
        for a in axes:
            shape[a], strides[a] = 1, odd
        named = {
            n: TensorArg(0x1000000 * (i + 1), tuple(shape), tuple(strides), "bf16", 0)
            for i, n in enumerate(("q", "k", "v", "out"))
        }
        for arg in packed(FULL, describe_launch(**named)).args:
            if isinstance(arg, TensorMapArgs):
                for stride in arg.strides_bytes:
                    assert 0 < stride < 2**40 and stride % 16 == 0
    # the geometry is canonical: another odd stride gives the same map
    one = {
        n: TensorArg(0x1000 * (i + 1), (1, 1, 1, 128), (odd, odd, odd, 1), "bf16", 0)
        for i, n in enumerate(("q", "k", "v", "out"))
    }
    assert by_name(packed(FULL, describe_launch(**one)))["tma_q"].strides_bytes == (256, 256, 256)


def test_expanded_heads_keep_stride_zero() -> None:
    base = launch()
    k = dataclasses.replace(base.tensors["k"], strides=(64000, 128, 0, 1))
    args = by_name(packed(FULL, describe_launch(**(dict(base.tensors) | {"k": k}))))
    assert args["tma_k"].strides_bytes == (256, 0, 128000)


def test_t10_64_bit_strides_survive() -> None:
    """T10, T07: strides beyond 2^31 elements, in a map and as LSE strides."""
    big = 2**31 + 64
    base = launch()
    k = dataclasses.replace(base.tensors["k"], strides=(big, 256, 128, 1))
    lse = TensorArg(0x9000000, (2, 8, 300), (big, 2**33, 9728), "float32", 0)
    args = by_name(packed(FULL, describe_launch(**(dict(base.tensors) | {"k": k}), lse=lse)))
    assert args["tma_k"].strides_bytes[2] == 2 * big
    assert (args["lse_stride_b"], args["lse_stride_h"], args["lse_stride_s"]) == (big, 2**33, 9728)
    limit = dataclasses.replace(base.tensors["k"], strides=(2**39 - 8, 256, 128, 1))
    args = by_name(packed(FULL, describe_launch(**(dict(base.tensors) | {"k": limit}))))
    assert args["tma_k"].strides_bytes[2] == 2**40 - 16


def test_z06_l02_no_keys_get_a_dummy_map_over_q() -> None:
    """Z06, L02: a null pointer and a zero extent never reach the driver; the kernel learns seqlen_k = 0."""
    none = TensorArg.contiguous(0, (2, 0, 2, 128), "bf16", 0)
    args = by_name(packed(FULL, launch(k=none, v=none)))
    for name in ("tma_k", "tma_v"):
        arg = args[name]
        assert arg.extents == (128, 1, 2, 2) and arg.memory == "q" and arg.address == 0x1000000
        assert all(s % 16 == 0 and 0 <= s < 2**40 for s in arg.strides_bytes)
    assert args["seqlen_k"] == 0 and args["tma_q"].extents == (128, 300, 8, 2)
    assert by_name(packed(CAUSAL, launch(k=none, v=none, causal=True)))["heads_per_section"] == 16


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"sq": 0}, {"batch": 0, "sk": 0}])
def test_l09_z05_no_queries_is_no_launch(sizes: dict[str, int]) -> None:
    assert pack(FULL, launch(**sizes), 148) is None
    assert pack(CAUSAL, launch(**sizes, causal=True), 148) is None


@pytest.mark.parametrize("num_sms", [1, 7, 148, 1000])
def test_r11_the_grid_follows_the_override_and_nothing_else_does(num_sms: int) -> None:
    assert packed(FULL, launch(), num_sms).grid == (min(num_sms, 32), 1, 1)
    assert packed(FULL, launch(), num_sms).args == packed(FULL, launch(), 148).args
    assert packed(CAUSAL, launch(causal=True), num_sms).grid == (32, 1, 1)
    chosen = pack(CAUSAL, launch(causal=True), num_sms, override=True)
    assert chosen is not None and chosen.grid == (min(num_sms, 32), 1, 1)


def test_grid_is_whole_clusters() -> None:
    pair = make_record(cluster=(2, 1, 1))[0]
    assert packed(pair, launch(), 147).grid == (32, 1, 1)
    assert packed(pair, launch(), 7).grid == (8, 1, 1)


def test_computed_scalars_come_from_the_records_rule() -> None:
    assert by_name(packed(CAUSAL, launch(causal=True, sk=4096)))["heads_per_section"] == 16
    rule = m.Rule("heads_per_section", {"l2_bytes": 4 * 2**20})
    record = dataclasses.replace(CAUSAL, launch=dataclasses.replace(CAUSAL.launch, scalars={"heads_per_section": rule}))
    assert by_name(packed(record, launch(causal=True, sk=4096)))["heads_per_section"] == 2


def with_param(record: m.KernelRecord, index: int, **changes: Any) -> m.KernelRecord:
    params = list(record.params)
    params[index] = dataclasses.replace(params[index], **changes)
    return dataclasses.replace(record, params=tuple(params))


@pytest.mark.parametrize(
    ("index", "name"), [(4, "page_table"), (5, "lse_stride_x"), (8, "num_splits"), (13, "softcap")]
)
def test_parameters_of_a_newer_bundle_are_refused_not_guessed(index: int, name: str) -> None:
    with pytest.raises(BundleError, match=f"parameter {name} .*unknown"):
        pack(with_param(FULL, index, name=name), launch(), 148)


def test_map_records_that_do_not_fit_the_tensors_are_refused() -> None:
    spec = FULL.params[1].tensor_map
    assert spec is not None
    axes = (spec.axes[0], dataclasses.replace(spec.axes[1], extent="seqlen_q"), *spec.axes[2:])
    for bad, words in (
        (dataclasses.replace(spec, tensor="page_pool"), "tensor 'page_pool'"),
        (dataclasses.replace(spec, element="fp16"), "element fp16"),
        (dataclasses.replace(spec, axes=axes), "axis s is bounded by seqlen_q, that of k is seqlen_k"),
        (None, "no tensor map record"),
    ):
        with pytest.raises(BundleError, match=words):
            pack(with_param(FULL, 1, tensor_map=bad), launch(), 148)


def test_lse_wanted_from_a_kernel_without_the_parameter() -> None:
    without = dataclasses.replace(FULL, params=tuple(p for p in FULL.params if not p.name.startswith("lse")))
    assert "lse" not in by_name(packed(without, launch()))
    lse = TensorArg.contiguous(0x900000, (2, 8, 300), "float32", 0)
    with pytest.raises(SelectionError, match="lse: true"):
        pack(without, launch(lse=lse), 148)
    with pytest.raises(ProblemError, match="lse: not given"):
        pack(with_param(FULL, 4, nullable=False), launch(), 148)


# ---- what tensors may be


class Cai:
    def __init__(self, **fields: Any) -> None:
        self.__cuda_array_interface__ = {"version": 3, "data": (0x5000, False), **fields}


def test_array_interfaces_are_read_without_their_library() -> None:
    from fmha_gen.runtime.tensors import HOST, as_tensor

    bf16 = Cai(shape=(2, 3, 4, 8), typestr="<V2", strides=None)
    assert as_tensor(bf16, "q") == TensorArg(0x5000, (2, 3, 4, 8), (96, 32, 8, 1), "bf16", None)
    view = Cai(shape=(2, 3), typestr="<f2", strides=(1 << 36, 32))
    assert as_tensor(view, "q") == TensorArg(0x5000, (2, 3), (1 << 35, 16), "fp16", None)
    with pytest.raises(ProblemError, match="q: stride of axis 0 is 33 bytes"):
        as_tensor(Cai(shape=(2, 3), typestr="<f2", strides=(33, 2)), "q")
    with pytest.raises(ProblemError, match="k: str is no tensor"):
        as_tensor("tensor", "k")

    import numpy as np

    host = np.zeros((4, 6, 8), np.uint16)[::2, :, :]
    arg = as_tensor(host, "q", "bf16")
    assert arg == TensorArg(host.ctypes.data, (2, 6, 8), (96, 8, 1), "bf16", HOST)
    assert as_tensor(np.zeros((2, 3), np.float32), "lse", "bf16").dtype == "float32"


def test_dlpack_is_read_without_its_library() -> None:
    import numpy as np

    from fmha_gen.runtime.tensors import HOST, as_tensor

    array = np.zeros((4, 6, 8), np.float16)[:, ::3, :]

    class Wrapped:
        """Offers DLPack only."""

        def __dlpack__(self, **kwargs: Any) -> Any:
            return array.__dlpack__(**kwargs)

        def __dlpack_device__(self) -> Any:
            return array.__dlpack_device__()

    arg = as_tensor(Wrapped(), "q")
    assert arg == TensorArg(array.ctypes.data, (4, 2, 8), (48, 24, 1), "fp16", HOST)


def test_dlpack_of_a_producer_that_knows_no_stream_of_minus_1() -> None:
    """JAX 0.11 takes it for a handle, and fails."""
    import numpy as np

    from fmha_gen.runtime.tensors import as_tensor

    array = np.zeros((4, 6, 8), np.float16)

    class OnDevice:
        def __dlpack__(self, stream: int | None = None) -> Any:
            if stream is not None:
                raise RuntimeError("CUDA_ERROR_INVALID_HANDLE")
            return array.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    assert as_tensor(OnDevice(), "q").address == array.ctypes.data
