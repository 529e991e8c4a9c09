"""Arguments of wrong types: refused by name, with what came and what is wanted, never by an error from deep inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmha_gen.errors import FmhaGenError, ProblemError
from fmha_gen.runtime import Bundle, Problem, TensorArg
from fmha_gen.runtime.cuda import CudaDriver
from tests.launcher_fixtures import FakeCuda, make_record, write_bundle
from tests.unit.test_overlap import separate
from tests.unit.test_recipe import torch_like

STRANGE: list[Any] = [
    5, 5.5, "x", b"x", True, None, [], {}, object(), float("nan"), -1, 10**30, (1,), np.float32(2), np.int64(3), len
]  # fmt: skip
SIZES: dict[str, Any] = {
    "dtype": "bf16", "batch": 1, "seqlen_q": 5, "seqlen_k": 5, "num_heads_q": 1, "num_heads_kv": 1, "head_dim_qk": 128,
    "head_dim_v": 128,
}  # fmt: skip
OPTIONS = ("causal", "window", "softmax_scale", "softcap", "sink", "dtype", "variant", "num_sms")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle"), [make_record(q_stage=stage) for stage in (1, 2)])[0]


def calls(path: Path) -> dict[str, Callable[[Any], Any]]:
    """Argument by argument: what a caller may get wrong."""

    def bundle() -> Bundle:
        return Bundle.open(path, CudaDriver(FakeCuda()))

    found: dict[str, Callable[[Any], Any]] = {
        "open": lambda x: Bundle.open(x, CudaDriver(FakeCuda())),
        "open, driver": lambda x: Bundle.open(path, x),
        "record": lambda x: bundle().record(x),
        "preload, pattern": lambda x: bundle().preload(x),
        "preload, device": lambda x: bundle().preload(None, x),
        "select": lambda x: bundle().select(x),
        "select, device": lambda x: bundle().select(Problem(**SIZES), x),
        "select, variant": lambda x: bundle().select(Problem(**SIZES), 0, x),
        "covers": lambda x: bundle().covers(x),
        "covers, device": lambda x: bundle().covers(Problem(**SIZES), x),
        "prepared, stream": lambda x: bundle().prepare(**separate())(x),
        "rebind": lambda x: bundle().prepare(**separate()).rebind(x),
        "rebind, addresses": lambda x: bundle().prepare(**separate()).rebind((x,) * 5),
        "launch_at": lambda x: bundle().prepare(**separate()).launch_at(x, 0),
        "contiguous": lambda x: TensorArg.contiguous(256, x, "bf16"),
    }
    for name in (*OPTIONS, "stream"):
        found[f"attention, {name}"] = lambda x, name=name: bundle().attention(
            **separate(), **({"stream": 0} | {name: x})
        )
        found[f"attention of torch tensors, {name}"] = lambda x, name=name: bundle().attention(
            **torch_like(separate()), **({"stream": 0} | {name: x})
        )
    for name in ("q", "k", "v", "out", "lse"):
        found[f"attention, {name}"] = lambda x, name=name: bundle().attention(**(separate() | {name: x}), stream=0)
    for name in (*SIZES, "mask", "window", "features", "softmax_scale", "lse"):
        found[f"Problem, {name}"] = lambda x, name=name: bundle().select(Problem(**(SIZES | {name: x})))
    for name in ("address", "shape", "strides", "dtype", "device"):
        for tensor in ("q", "out", "lse"):
            found[f"{tensor}: {name}"] = lambda x, name=name, tensor=tensor: bundle().attention(
                **(separate() | {tensor: _changed(separate()[tensor], name, x)}), stream=0
            )
    return found


def _changed(t: TensorArg, name: str, value: Any) -> TensorArg:
    fields = {n: getattr(t, n) for n in TensorArg.__slots__}
    return TensorArg(**(fields | {name: value}))


def test_whatever_comes_is_taken_or_refused_in_words(path: Path) -> None:
    refused = 0
    for what, call in calls(path).items():
        for value in STRANGE:
            try:
                call(value)
            except FmhaGenError:
                refused += 1
            except Exception as e:
                pytest.fail(f"{what}: {value!r}: {type(e).__name__}: {e}")
    assert refused > 700


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("open", 5, r"bundle: 5 \(int\); wanted is a path: a string or a pathlib.Path"),
        ("open", b"out/core", r"bundle: b'out/core' \(bytes\); wanted is a path"),
        ("open", None, "bundle: None; wanted is a path"),
        ("open, driver", "sim", r"driver: 'sim' \(str\); wanted is a driver, e.g. fmha_gen.sim.driver.SimDriver\(\)"),
        ("attention, variant", 5, r"variant: 5 \(int\); wanted is a glob over kernel ids as a string, e.g. .*"),
        ("preload, pattern", ["a"], r"pattern: \['a'\] \(list\); wanted is a glob"),
        ("attention, num_sms", 1.5, r"num_sms: 1.5 \(float\); wanted is a number of multiprocessors, or None"),
        ("attention, num_sms", True, r"num_sms: True \(bool\); wanted"),
        ("attention, num_sms", 0, "num_sms: 0; wanted is a number of multiprocessors, or None, from 1 to"),
        ("attention, dtype", "fp32", r"dtype: 'fp32' \(str\); wanted is one of bf16, fp16, or None"),
        ("attention, softcap", [], r"softcap: list \[\] is no number; wanted is a float >= 0"),
        ("attention, softmax_scale", 10**400, "softmax_scale: an integer of 1329 bits is no float"),
        ("select", {"dtype": "bf16"}, r"problem: \{'dtype': 'bf16'\} \(dict\); wanted is a fmha_gen.runtime.Problem"),
        ("select, device", "cuda", r"device: 'cuda' \(str\); wanted is a CUDA ordinal, or a fmha_gen.runtime.Device"),
        ("record", "an id", r"entry: 'an id' \(str\); wanted is an index entry of this bundle"),
        ("prepared, stream", [], r"stream: \[\] \(list\); wanted is the raw handle"),
        ("rebind", (1, 2), r"addresses: \(1, 2\) \(tuple\); wanted is a tuple of the addresses of q, k, v, out, lse"),
        ("rebind, addresses", None, "addresses: q: None; wanted is an address in bytes"),
        ("q: shape", 5, r"q: shape: 5 \(int\); wanted is a tuple of integers, one an axis"),
        ("lse: address", 1.5, r"lse: address: 1.5 \(float\); wanted is an address in bytes"),
        ("Problem, features", "sink", r"features: 'sink' \(str\); wanted is a tuple of names"),
        ("open", "x" * 0 or [0] * 1000, r"bundle: \[0, .{10,70}\.\.\. \(list\); wanted"),
    ],
)  # fmt: skip
def test_the_words_say_what_came_and_what_is_wanted(path: Path, what: str, value: Any, words: str) -> None:
    with pytest.raises(ProblemError, match=f"^{words}"):
        calls(path)[what](value)


def test_integers_of_other_libraries_and_lists_are_taken(path: Path) -> None:
    bundle = Bundle.open(str(path), CudaDriver(api := FakeCuda()))
    q = separate()["q"]
    given = separate() | {"q": TensorArg(np.int64(q.address), list(q.shape), np.array(q.strides), "bf16", 0)}  # type: ignore[arg-type]
    bundle.attention(**given, stream=np.int64(7), num_sms=np.int32(3), softmax_scale=np.float32(0.5))
    assert api.launches[-1].hStream == 7 and api.launches[-1].gridDimX == 3


def test_the_torch_functions_name_what_is_no_tensor(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="the functions are torch's")
    from fmha_gen.interop import torch as interop

    monkeypatch.setattr(interop, "_bundle", Bundle.open(path, CudaDriver(FakeCuda())))
    good, several = torch.zeros(1, 4, 2, 128, dtype=torch.bfloat16), torch.zeros(2)
    for value in [v for v in STRANGE if v is not None and not isinstance(v, np.generic)]:
        for name in ("q", "k", "v", "out", "lse"):
            with pytest.raises(ProblemError, match=f"^{name}: {type(value).__name__} is no (torch )?tensor"):
                interop.flash_attn_func(**({"q": good, "k": good, "v": good} | {name: value}))
        for name in ("query", "key", "value"):
            with pytest.raises(ProblemError, match=f"^{name}: {type(value).__name__} is no torch tensor"):
                interop.scaled_dot_product_attention(**({"query": good, "key": good, "value": good} | {name: value}))
        (why,) = interop.covers(good, value, good)
        assert why == f"k: {type(value).__name__} is no torch tensor; pass one"
    for name in ("softcap", "num_splits", "dropout_p", "pack_gqa", "sm_margin"):
        with pytest.raises(ProblemError, match=rf"^{name}: tensor of shape \(2,\)"):
            interop.flash_attn_func(good, good, good, **{name: several})
    with pytest.raises(ProblemError, match=r"^bundle: 5 \(int\); wanted is a path"):
        interop.use_bundle(5)  # type: ignore[arg-type]
