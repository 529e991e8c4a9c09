"""Compilation on a dask.distributed cluster: the same task, the same bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fmha_gen.build import BuildOptions, build_bundle
from fmha_gen.build.executors import open_executor
from fmha_gen.bundle import check_bundle
from fmha_gen.errors import CompileError, ToolchainError
from fmha_gen.resources import data_dir
from fmha_gen.spec import BundleHeader, read_specs

pytestmark = pytest.mark.compile


def test_addresses_are_checked():
    with open_executor(None) as executor:
        assert executor is None
    for bad in ("dask://", "dask://host", "tcp://host:1", "host:1", "dask://host:1/x"):
        with pytest.raises(ToolchainError, match="not of the form dask://HOST:PORT"), open_executor(bad):
            pass


def test_a_cluster_gives_the_bytes_of_the_local_pool(tmp_path: Path):
    distributed = pytest.importorskip("distributed", reason="dask.distributed is not installed")
    spec = read_specs([data_dir("specs") / "core.yaml"]).specs[0]
    header = BundleHeader("demo", "1.0.0")
    options = BuildOptions(cache_dir=tmp_path / "cache")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None, protocol="tcp") as cluster:
        address = cluster.scheduler_address.replace("tcp://", "dask://")
        with open_executor(address) as executor:
            options = dataclasses.replace(options, executor=executor)
            result = build_bundle(header, [spec], tmp_path / "out", options)
            slow = dataclasses.replace(options, time_limit_s=0.2, cache_dir=tmp_path / "other")
            with pytest.raises(CompileError, match="took longer than its limit of 0.2 s"):
                build_bundle(header, [spec], tmp_path / "slow", slow)
    assert result.count("compiled") == 1
    (record,) = check_bundle(result.root).records
    here = build_bundle(header, [spec], tmp_path / "local", BuildOptions(cache_dir=tmp_path / "local cache"))
    (local,) = check_bundle(here.root).records
    assert (record.cubin, record.ptx, record.line_map) == (local.cubin, local.ptx, local.line_map)
    with pytest.raises(ToolchainError, match="no scheduler answers"), open_executor(address):
        pass
