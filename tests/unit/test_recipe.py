"""Launches of new geometries: compiled packing and recipes give, bit for bit, what preparing in full gives."""

from __future__ import annotations

import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from fmha_gen.errors import DriverError, ProblemError
from fmha_gen.manifest import KernelRecord, Rule
from fmha_gen.runtime import Bundle, TensorArg
from fmha_gen.runtime.cuda import CudaDriver
from fmha_gen.runtime.driver import ADDRESS_ORDER
from fmha_gen.runtime.pack import Packer
from fmha_gen.runtime.problem import describe_launch
from tests import reference_packer
from tests.launcher_fixtures import FakeCuda, make_record, read_arguments, write_bundle

DIMS = [(64, 64), (96, 96), (128, 128), (192, 128)]
LENGTHS = (0, 1, 2, 63, 127, 128, 129, 255, 257, 300, 511, 5000, 2**20)


class Torch:
    """What the launcher reads of a torch tensor."""

    def __init__(self, arg: TensorArg) -> None:
        self.arg, self.shape = arg, arg.shape
        self.dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}.get(arg.dtype, f"torch.{arg.dtype}")

    def data_ptr(self) -> int:
        return self.arg.address

    def stride(self) -> tuple[int, ...]:
        return self.arg.strides

    def get_device(self) -> int:
        return self.arg.device or 0


Torch.__module__ = "torch"


def torch_like(named: dict[str, Any]) -> dict[str, Any]:
    return {n: Torch(t) if isinstance(t, TensorArg) else t for n, t in named.items()}


def some_tensors(rng: random.Random, dtype: str, dims: tuple[int, int]) -> dict[str, TensorArg]:
    """Tensors as frameworks give them: dense, transposed, sliced, padded, expanded, odd strides on size-1 axes."""
    batch, kv_heads, ratio = rng.choice((1, 2, 5)), rng.choice((1, 2, 3)), rng.choice((1, 2, 3, 7, 8))
    sq, sk = rng.choice(LENGTHS[1:]), rng.choice(LENGTHS)
    shapes = {
        "q": (batch, sq, kv_heads * ratio, dims[0]), "k": (batch, sk, kv_heads, dims[0]),
        "v": (batch, sk, kv_heads, dims[1]), "out": (batch, sq, kv_heads * ratio, dims[1]),
    }  # fmt: skip
    named = {}
    for name, shape in shapes.items():
        b, s, h, d = shape
        pad = rng.choice((0, 8, 128, 2**31 + 64))
        strides = rng.choice(
            [(s * h * d, h * d, d, 1), (s * h * d, d, s * d, 1), (s * 3 * h * d + pad, 3 * h * d, d, 1)]
        )
        if name in "kv" and rng.random() < 0.2:
            strides = (strides[0], strides[1], 0, 1)
        strides = tuple(rng.choice((0, 1, 7, 2**40, n)) if e == 1 else n for e, n in zip(shape, strides, strict=True))
        address = ADDRESS_ORDER.index(name) * 2**45 + rng.randrange(1, 2**40) * 16
        address = 0 if 0 in shape and rng.random() < 0.5 else address
        named[name] = TensorArg(address, shape, (*strides[:3], 1), dtype, 0)
    if rng.random() < 0.5:
        heads = kv_heads * ratio
        strides = rng.choice([(heads * sq, sq, 1), (sq * heads, 1, heads), (2**36, 2**32 + 1, 3)])
        named["lse"] = TensorArg(2**47 + rng.randrange(1, 2**40) * 4, (batch, heads, sq), strides, "float32", 0)
    return named


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_compiled_packer_gives_what_the_table_says(dims: tuple[int, int], mask: str) -> None:
    rng = random.Random(f"{dims}{mask}")
    record = make_record("fp16", dims, mask, q_stage=rng.choice((1, 2)), cluster=rng.choice(((1, 1, 1), (2, 1, 1))))[0]
    if mask == "causal":
        rule = Rule("heads_per_section", {"l2_bytes": 2**22})
        record = dataclasses.replace(record, launch=dataclasses.replace(record.launch, scalars={rule.name: rule}))
    packer = Packer(record)
    for _ in range(300):
        launch = describe_launch(
            **some_tensors(rng, "fp16", dims), causal=mask == "causal", softmax_scale=rng.choice((None, 0.0, 0.3))
        )  # fmt: skip
        sms, override = rng.choice((1, 7, 132)), rng.random() < 0.5
        scale = launch.problem.softmax_scale_log2
        got = packer.pack(launch.sizes, launch.memory, scale, sms, override)
        assert got == reference_packer.pack(record, launch, sms, override)


def kernels() -> list[tuple[KernelRecord, bytes, bytes]]:
    return [
        make_record(dtype, dims, mask, q_stage=stage)
        for dtype in ("bf16", "fp16")
        for dims in DIMS
        for mask in ("full", "causal")
        for stage in (1, 2)
    ]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle"), kernels())[0]


def test_a_recipe_gives_the_bits_of_preparing_in_full(path: Path) -> None:
    """A bundle that has seen many geometries against one that has seen none; what the GPU reads, too."""
    rng = random.Random(0)
    seasoned = Bundle.open(path, CudaDriver(api := FakeCuda()))
    prepared_in_full = 0
    for _ in range(400):
        dtype, dims = rng.choice(("bf16", "fp16")), rng.choice(DIMS)
        named = some_tensors(rng, dtype, dims)
        options: dict[str, Any] = {"causal": rng.random() < 0.5, "softmax_scale": rng.choice((None, 0.25))}
        options["num_sms"] = rng.choice((None, 7))
        before = len(seasoned._cache._recipes)
        got = seasoned.prepare(**torch_like(named), **options)
        prepared_in_full += len(seasoned._cache._recipes) - before
        fresh_api = FakeCuda()
        want = Bundle.open(path, CudaDriver(fresh_api)).prepare(**named, **options)
        assert (got.kernel, got.device, got.packed) == (want.kernel, want.device, want.packed)
        got(3)
        want(3)
        kinds = want.packed.kinds  # type: ignore[union-attr]
        assert read_arguments(api.launches[-1].params, kinds) == read_arguments(fresh_api.launches[-1].params, kinds)
        assert vars(api.launches[-1]) | {"params": 0, "kernel": 0} == vars(fresh_api.launches[-1]) | {
            "params": 0, "kernel": 0
        }  # fmt: skip
    assert prepared_in_full < 200, "half of the launches at least must have come from a recipe"


def dense(dtype: str = "bf16", b: int = 2, sq: int = 300, sk: int = 500, hq: int = 8, hk: int = 2, d: int = 128) -> Any:
    shapes = {"q": (b, sq, hq, d), "k": (b, sk, hk, d), "v": (b, sk, hk, d), "out": (b, sq, hq, d), "lse": (b, hq, sq)}
    return {
        n: TensorArg.contiguous(0x10000000 * (i + 1), s, "float32" if n == "lse" else dtype, 0)
        for i, (n, s) in enumerate(shapes.items())
    }


def test_a_recipe_chooses_the_kernel_for_the_rows(path: Path) -> None:
    bundle = Bundle.open(path, CudaDriver(FakeCuda()))
    for rows, stage in ((300, "q2"), (128, "q1"), (1, "q1"), (129, "q2")):
        assert f"-{stage}-" in bundle.prepare(**torch_like(dense(sq=rows))).kernel
    assert len(bundle._cache._recipes) == 1


def test_a_growing_sequence_encodes_one_map_a_step(path: Path) -> None:
    """Decode: k and v are longer at each step, q and out stay where they are."""
    bundle = Bundle.open(path, CudaDriver(api := FakeCuda()))
    cache = dense(sq=1, sk=4096)
    strides = cache["k"].strides
    for step in range(1, 50):
        grown = {n: dataclasses.replace(cache[n], shape=(2, step, 2, 128), strides=strides) for n in ("k", "v")}
        calls = len(api.calls)
        bundle.attention(**torch_like(cache | grown), stream=0)
        did = [c[0] for c in api.calls[calls:] if c[0].startswith(("cuTensorMap", "cuLaunch"))]
        if step > 1:
            assert did == ["cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress", "cuLaunchKernelEx"]


WRONG: dict[str, dict[str, Any]] = {
    "k and v of different lengths": {"v": (2, 501, 2, 128)},
    "heads that do not divide": {"k": (2, 500, 3, 128), "v": (2, 500, 3, 128)},
    "no kv heads": {"k": (2, 500, 0, 128), "v": (2, 500, 0, 128)},
    "another batch": {"k": (3, 500, 2, 128), "v": (3, 500, 2, 128)},
    "out of other rows": {"out": (2, 301, 8, 128)},
    "lse laid out otherwise": {"lse": (2, 300, 8)},
    "three axes": {"k": (500, 2, 128)},
    "head dim of k": {"k": (2, 500, 2, 64)},
    "far too long": {"k": (2, 2**31, 2, 128), "v": (2, 2**31, 2, 128)},
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_wrong_shapes_are_refused_in_the_words_of_preparing_in_full(path: Path, what: str) -> None:
    bundle = Bundle.open(path, CudaDriver(FakeCuda()))
    bundle.prepare(**torch_like(dense()))
    named = dense()
    for name, shape in WRONG[what].items():
        named[name] = TensorArg.contiguous(0x70000000, shape, named[name].dtype, 0)
    with pytest.raises(ProblemError) as full:
        Bundle.open(path, CudaDriver(FakeCuda())).prepare(**named)
    with pytest.raises(ProblemError) as known:
        bundle.prepare(**torch_like(named))
    assert str(known.value) == str(full.value)


@pytest.mark.parametrize("name", ADDRESS_ORDER)
@pytest.mark.parametrize(
    "change",
    [{"address": 0}, {"address": 0x10000002}, {"strides": 1}, {"strides": -8}, {"strides": 2**41}, {"strides": 0},
     {"dtype": "float64"}, {"device": 1}],
)  # fmt: skip
def test_wrong_layouts_are_refused_in_the_words_of_preparing_in_full(
    path: Path, name: str, change: dict[str, Any]
) -> None:
    bundle = Bundle.open(path, CudaDriver(FakeCuda()))
    bundle.prepare(**torch_like(dense()))
    named = dense()
    if "strides" in change:
        old = named[name].strides
        change = {"strides": (old[0], change["strides"], *old[2:])}
    named[name] = dataclasses.replace(named[name], **change)
    words = []
    for target, tensors in ((Bundle.open(path, CudaDriver(FakeCuda())), named), (bundle, torch_like(named))):
        try:
            words.append(target.prepare(**tensors).packed)
        except ProblemError as e:
            words.append(str(e))  # type: ignore[arg-type]
    assert words[0] == words[1]


def test_a_recipe_loads_nothing_in_a_frozen_bundle(path: Path) -> None:
    """The recipe knows both kernels of its kind; the one that was never loaded stays an error."""
    bundle = Bundle.open(path, CudaDriver(FakeCuda()))
    bundle.prepare(**torch_like(dense(sq=300)))
    bundle.freeze()
    bundle.prepare(**torch_like(dense(sq=200)))
    with pytest.raises(DriverError, match="-q1-.*frozen"):
        bundle.prepare(**torch_like(dense(sq=1)))


def test_threads_share_recipes(path: Path) -> None:
    """Packers and kernels remember the last launch: other threads' launches must not leak into it."""
    bundle = Bundle.open(path, CudaDriver(FakeCuda()))
    bundle.prepare(**torch_like(dense()))
    failures: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            named = some_tensors(rng, "bf16", (128, 128))
            launch = describe_launch(**named)
            prepared = bundle.prepare(**torch_like(named))
            record = bundle.record(next(e for e in bundle.kernels if e.id == prepared.kernel))
            if prepared.packed != reference_packer.pack(record, launch, 148):
                failures.append((named, prepared.packed))
            args = read_arguments(prepared._bound._params, prepared.packed.kinds)  # type: ignore[union-attr]
            fresh = CudaDriver(FakeCuda())
            for arg, got in zip(prepared.packed.args, args, strict=True):  # type: ignore[union-attr]
                if isinstance(got, bytes) and got != fresh.encode(arg, prepared.device):
                    failures.append((arg, got))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
