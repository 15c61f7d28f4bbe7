"""Build options: refused by name where the backend does not support them, and set on the builder config elsewhere."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engines.building.build import build_bundle
from engines.building.preparation import BuildRequest
from engines.building.timing_cache import load_timing_cache
from engines.library.backend import Backend, choose_backend
from engines.library.gpu import Gpu
from engines.library.tensorrt_logger import create_logger
from engines.network.build_options import (
    HARDWARE_COMPATIBILITY,
    PROFILING_VERBOSITY,
    BuildOptions,
    apply_options,
    check_options,
)
from exporter.bundle.bundle import Bundle
from exporter.common.errors import BackendError, InputError

GPU = Gpu("NVIDIA Test 9000", "9.0")
RTX = Backend("tensorrt-rtx", SimpleNamespace(), "1.7.1", "asked for")
TENSORRT = Backend("tensorrt", SimpleNamespace(), "10.16.1", "asked for")
SWITCHES = ("version_compatible", "strip_plan", "refit", "tf32")


def test_options_are_taken_by_what_they_mean():
    odd = BuildOptions(np.int64(64), np.uint8(3), "x.cache", tf32=np.True_)
    assert odd == BuildOptions(64, 3, Path("x.cache"), tf32=True)
    assert json.dumps(odd.to_dict()) == json.dumps(BuildOptions(64, 3, Path("x.cache"), tf32=True).to_dict())


def test_a_build_request_is_taken_by_what_it_means():
    odd = BuildRequest(np.int64(2), np.array(8), np.uint8(32), "x:1", ["x:2"], ("x:3",))
    assert odd == BuildRequest(2, 8, 32, ("x:1",), ("x:2",), ("x:3",))
    assert {type(size) for size in (odd.max_batch, odd.max_seq_len, odd.cache_capacity)} == {int}


@pytest.mark.parametrize("name", ["max_batch", "max_seq_len", "cache_capacity"])
@pytest.mark.parametrize("value", [True, np.True_, "4", 4.0, [4]], ids=repr)
def test_a_size_that_is_no_whole_number_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"{name}: got"):
        BuildRequest(**{name: value})
    with pytest.raises(InputError, match="min_shapes: got"):
        BuildRequest(min_shapes=[value, 5])


@pytest.mark.parametrize("name", ["workspace_mib", "builder_optimization_level"])
@pytest.mark.parametrize("value", [True, "1", 1.0, [1]], ids=repr)
def test_an_option_that_is_no_whole_number_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"{name}: got"):
        BuildOptions(**{name: value})


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("value", ["no", 0, None], ids=repr)
def test_a_switch_that_is_neither_true_nor_false_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=f"{name}: got {value!r}, expected True or False"):
        BuildOptions(**{name: value})


EVERYTHING = BuildOptions(
    workspace_mib=7, builder_optimization_level=2, version_compatible=True, hardware_compatibility="ampere_plus",
    strip_plan=True, refit=True, profiling_verbosity="detailed", tf32=True,
)  # fmt: skip
FLAGS = {"VERSION_COMPATIBLE", "STRIP_PLAN", "REFIT", "TF32"}

# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("workspace_mib", 0, "workspace_mib: got 0, expected 1 to"),
        ("workspace_mib", -1, "workspace_mib: got -1, expected 1 to"),
        ("builder_optimization_level", -1, "builder_optimization_level: got -1, expected 0 to 5"),
        ("builder_optimization_level", 6, "builder_optimization_level: got 6, expected 0 to 5"),
        (
            "hardware_compatibility",
            "ampere",
            "hardware_compatibility: got 'ampere', expected one of none, ampere_plus, same_compute_capability",
        ),
        (
            "profiling_verbosity",
            "all",
            "profiling_verbosity: got 'all', expected one of layer_names_only, none, detailed",
        ),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_with_what_is_allowed(option, value, message):
    with pytest.raises(InputError, match=message):
        BuildOptions(**{option: value})


def test_the_record_has_every_option_and_of_the_timing_cache_only_whether_there_was_one():
    assert set(BuildOptions().to_dict()) == set(BuildOptions.__dataclass_fields__)
    assert BuildOptions().to_dict()["timing_cache"] is False
    assert BuildOptions(timing_cache=Path("/home/me/secret")).to_dict()["timing_cache"] is True


# --- what a backend supports ------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [(), (GPU,)], ids=["no GPU", "GPU"])
@pytest.mark.parametrize(
    "option", [{"timing_cache": Path("x")}, {"version_compatible": True}], ids=["timing-cache", "version-compatible"]
)
def test_tensorrt_rtx_refuses_what_it_never_honours_by_name(option, gpus):
    with pytest.raises(BackendError, match=f"{next(iter(option))}: tensorrt-rtx 1.7.1"):
        check_options(BuildOptions(**option), RTX, gpus)


@pytest.mark.parametrize("option", ["strip_plan", "refit"])
def test_tensorrt_rtx_refuses_engines_without_weights_where_no_gpu_is_visible(option):
    with pytest.raises(BackendError, match=f"{option}.*: .* needs a GPU"):
        check_options(BuildOptions(**{option: True}), RTX, [])


@pytest.mark.parametrize("option", ["strip_plan", "refit"])
def test_tensorrt_rtx_builds_engines_without_weights_where_a_gpu_is_visible(option):
    check_options(BuildOptions(**{option: True}), RTX, [GPU])


@pytest.mark.parametrize("option", ["strip_plan", "refit"])
def test_a_version_compatible_engine_cannot_be_refitted(option):
    with pytest.raises(BackendError, match=f"version_compatible with {option}"):
        check_options(BuildOptions(version_compatible=True, **{option: True}), TENSORRT, [GPU])
    check_options(BuildOptions(version_compatible=True), TENSORRT, [GPU])


@pytest.mark.parametrize("level", HARDWARE_COMPATIBILITY[1:])
def test_tensorrt_rtx_refuses_hardware_compatibility_which_its_config_ignores(level):
    with pytest.raises(BackendError, match="hardware_compatibility"):
        check_options(BuildOptions(hardware_compatibility=level), RTX, [])


def test_tensorrt_rtx_takes_everything_else_without_a_gpu():
    check_options(
        BuildOptions(workspace_mib=1, builder_optimization_level=5, profiling_verbosity="none", tf32=True), RTX, []
    )


def test_tensorrt_refuses_to_build_without_a_gpu_and_names_the_other_backend():
    with pytest.raises(BackendError, match=r"tensorrt 10\.16\.1: .*backend=tensorrt-rtx"):
        check_options(BuildOptions(), TENSORRT, [])


@pytest.mark.parametrize("left_out", [{"version_compatible": False}, {"refit": False, "strip_plan": False}])
def test_tensorrt_takes_every_option_where_a_gpu_is_visible(left_out):
    check_options(replace(EVERYTHING, timing_cache=Path("x"), **left_out), TENSORRT, [GPU])


# --- options on a config ------------------------------------------------------------------------------------


class Names:
    """An enumeration of TensorRT. The value of each name is the name."""

    def __getattr__(self, name: str) -> str:
        return name


class Config:
    """Keeps what is set on it. As in TensorRT, TF32 is allowed at the start."""

    def __init__(self) -> None:
        self.flags = {"TF32"}
        self.pools: dict[str, int] = {}
        self.builder_optimization_level = 3

    def set_flag(self, flag: str) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: str) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.pools[pool] = size


def applied(options: BuildOptions) -> Config:
    trt = SimpleNamespace(
        BuilderFlag=Names(), MemoryPoolType=Names(), HardwareCompatibilityLevel=Names(), ProfilingVerbosity=Names()
    )
    config = Config()
    apply_options(options, trt, config)
    return config


def test_the_defaults_clear_tf32_and_leave_tensorrts_own_limits():
    config = applied(BuildOptions())
    assert config.flags == set()
    assert config.pools == {}
    assert config.builder_optimization_level == 3
    assert (config.hardware_compatibility_level, config.profiling_verbosity) == ("NONE", "LAYER_NAMES_ONLY")


@pytest.mark.parametrize("option", ["version_compatible", "strip_plan", "refit", "tf32"])
def test_a_switch_sets_its_own_flag_alone(option):
    assert applied(BuildOptions(**{option: True})).flags == {option.upper()}


def test_the_workspace_is_limited_in_bytes():
    assert applied(BuildOptions(workspace_mib=3)).pools == {"WORKSPACE": 3 * 1024 * 1024}


@pytest.mark.parametrize("level", [0, 5])
def test_the_optimization_level_reaches_the_config(level):
    assert applied(BuildOptions(builder_optimization_level=level)).builder_optimization_level == level


@pytest.mark.parametrize("level", HARDWARE_COMPATIBILITY)
def test_the_hardware_compatibility_reaches_the_config(level):
    assert applied(BuildOptions(hardware_compatibility=level)).hardware_compatibility_level == level.upper()


@pytest.mark.parametrize("verbosity", PROFILING_VERBOSITY)
def test_the_profiling_verbosity_reaches_the_config(verbosity):
    assert applied(BuildOptions(profiling_verbosity=verbosity)).profiling_verbosity == verbosity.upper()


@pytest.fixture(scope="module")
def real():
    """tensorrt_rtx with a builder config. The builder is kept, because the config needs it."""
    backend = choose_backend("tensorrt-rtx")
    logger = create_logger(backend.trt)
    builder = backend.trt.Builder(logger)
    return SimpleNamespace(trt=backend.trt, config=builder.create_builder_config(), builder=builder, logger=logger)


@pytest.mark.parametrize(
    ("options", "flags"), [(EVERYTHING, FLAGS), (BuildOptions(), set()), (BuildOptions(refit=True), {"REFIT"})]
)
def test_a_real_config_reads_back_the_flags(real, options, flags):
    apply_options(options, real.trt, real.config)
    assert {name for name in FLAGS if real.config.get_flag(getattr(real.trt.BuilderFlag, name))} == flags


def test_a_real_config_starts_with_tf32_allowed_so_clearing_it_matters(real):
    assert real.builder.create_builder_config().get_flag(real.trt.BuilderFlag.TF32)


def test_a_real_config_reads_back_the_limits(real):
    apply_options(EVERYTHING, real.trt, real.config)
    assert real.config.get_memory_pool_limit(real.trt.MemoryPoolType.WORKSPACE) == 7 * 2**20
    assert real.config.builder_optimization_level == 2
    assert real.config.profiling_verbosity == real.trt.ProfilingVerbosity.DETAILED


# --- the timing cache ---------------------------------------------------------------------------------------


class TimingConfig:
    """Makes a cache from any content except b"damaged", and takes any cache except b"foreign"."""

    cache = None

    def create_timing_cache(self, content: bytes) -> bytes | None:
        return None if content == b"damaged" else content

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache == b"foreign":
            return False
        self.cache = cache
        return True


def loaded(path: Path) -> tuple[bytes | None, list[str]]:
    config, said = TimingConfig(), []
    load_timing_cache(path, config, said.append)
    return config.cache, said


def test_a_good_timing_cache_is_used(tmp_path):
    (tmp_path / "timing").write_bytes(b"good")
    assert loaded(tmp_path / "timing") == (b"good", [])


def test_a_missing_timing_cache_makes_a_new_one_without_a_warning(tmp_path):
    assert loaded(tmp_path / "timing") == (b"", [])


@pytest.mark.parametrize("content", [b"damaged", b"foreign"])
def test_a_timing_cache_that_does_not_fit_is_replaced_with_a_warning(tmp_path, content):
    (tmp_path / "timing").write_bytes(content)
    cache, (line,) = loaded(tmp_path / "timing")
    assert cache == b""
    assert line.startswith(f"warning: timing cache {tmp_path / 'timing'}")


# The backend is tensorrt-rtx under the name of tensorrt, because timing caches work only there.
@pytest.mark.filterwarnings("ignore:Use Deprecated:DeprecationWarning")
@pytest.mark.parametrize("content", [None, b"damaged"], ids=["missing", "damaged"])
def test_a_build_saves_its_timing_cache(tiny_bundle, tmp_path, monkeypatch, content):
    path = tmp_path / "timing"
    if content is not None:
        path.write_bytes(content)
    folder = shutil.copytree(tiny_bundle("component:rms_norm", "fp16").folder, tmp_path / "bundle")
    for module in ("preparation", "build"):
        monkeypatch.setattr(f"engines.building.{module}.visible_gpus", lambda: [GPU])
    backend = replace(choose_backend("tensorrt-rtx"), name="tensorrt", version="10.16.1")
    build_bundle(Bundle.open(folder), backend, BuildRequest(options=BuildOptions(timing_cache=path)))
    assert path.is_file()
    assert path.read_bytes() not in (b"", b"damaged")
