"""The lock has what pyproject.toml asks for, each file by its SHA-256, and this environment has nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from locks import install
from locks.check import (
    added_by_other_extras,
    environment_problems,
    installed_packages,
    locked_packages,
    problems,
    range_problems,
    requirements,
)
from locks.install import asks_for_cuda, check_torch
from locks.lockfile import (
    CUDA,
    INSTALLED,
    PACKAGES,
    ROOT,
    TORCH,
    UV,
    Pin,
    applies_here,
    pins_for_this_machine,
    read_pins,
)
from locks.renew import PYTHONS, SOURCE_ONLY, TARGETS, marker

HASH = "0" * 64


def pin(name: str, version: str, marker: str = "") -> Pin:
    return Pin(name, version, marker, frozenset({HASH}))


# --- as it is ---------------------------------------------------------------------------------------------------------


def test_the_lock_covers_pyproject_and_this_environment_equals_it():
    assert problems() == []


def test_no_package_is_in_two_files():
    names = [name for path in INSTALLED for name in read_pins(path)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", [*INSTALLED, UV], ids=lambda path: path.name)
def test_pip_itself_refuses_a_file_that_the_lock_does_not_list(path):
    options = [line for line in path.read_text().splitlines() if line.startswith("--")]
    allowed = ["--require-hashes", "--only-binary :all:"]
    assert options == allowed + ([f"--no-binary {','.join(SOURCE_ONLY)}"] if path == PACKAGES else [])


def test_every_extra_that_a_message_or_a_page_names_exists():
    text = "".join(
        path.read_text() for folder in ("exporter", "engines", "runtime") for path in (ROOT / folder).rglob("*.py")
    )
    text += "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    named = set(re.findall(r"blockline\[([a-z0-9,-]+)\]", text))
    assert "polygraphy" in named
    assert named <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def test_the_pythons_of_the_lock_are_those_of_pyproject_and_of_the_makefile():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = SpecifierSet(project["requires-python"])
    assert [f"3.{minor}" for minor in range(40) if allowed.contains(f"3.{minor}.1")] == list(PYTHONS)
    classifiers = [line.rpartition(" :: ")[2] for line in project["classifiers"] if " Python :: " in line]
    assert classifiers == list(PYTHONS)
    assert f"\nPYTHONS := {' '.join(PYTHONS)}\n" in (ROOT / "Makefile").read_text()


# --- what would be wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["numpy>=2 --hash=sha256:" + HASH, "numpy==2.4.6", "numpy", "numpy==2.4.6 --hash=md5:" + "0" * 32]
)
def test_a_line_without_one_version_and_a_hash_is_refused(tmp_path, line):
    path = tmp_path / "packages.txt"
    path.write_text(f"# a comment\n--require-hashes\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(line[:40])):
        read_pins(path)


def test_a_name_that_comes_twice_is_refused(tmp_path):
    path = tmp_path / "packages.txt"
    path.write_text(
        "".join(f"{name}==1 \\\n    --hash=sha256:{HASH}\n" for name in ("typing_extensions", "typing-extensions"))
    )
    with pytest.raises(ValueError, match="comes twice"):
        read_pins(path)


def test_a_requirement_outside_of_the_lock_is_named():
    wanted = [Requirement("onnx>=1.23"), Requirement("NumPy>=2"), Requirement("rich>=13")]
    found = range_problems(wanted, {"onnx": pin("onnx", "1.20"), "rich": pin("rich", "15.0.0")})
    assert found == ["onnx>=1.23: the lock has 1.20", "NumPy>=2: the lock does not have it"]


def test_the_requirements_are_those_of_every_extra_that_setup_installs():
    names = {requirement.name for requirement in requirements()}
    assert {"setuptools", "torch", "transformers", "tensorrt-rtx", "pytest", "mypy"} <= names


def test_another_environment_is_named_package_by_package():
    pins = {name: pin(name, "1.0") for name in ("torch", "same", "other", "gone")} | {
        "elsewhere": pin("elsewhere", "1.0", "sys_platform == 'win32'")
    }
    installed = {"torch": "1.0+cpu", "same": "1.0", "other": "1.0.1", "extra": "3", "pip": "23.2", "blockline": "0.1.0"}
    assert environment_problems(installed, pins) == [
        "extra: got 3, expected nothing",
        "gone: got nothing, expected 1.0",
        "other: got 1.0.1, expected 1.0",
    ]


def test_what_another_extra_brings_may_be_here_too():
    added = added_by_other_extras(installed_packages())
    assert {
        "polygraphy",
        "cuda-python",
        "cuda-bindings",
    } <= added  # of the extras polygraphy and tensorrt, and what they ask for
    assert "onnx" not in added
    assert environment_problems({"tensorrt": "11.0", "other": "1"}, {}, {"tensorrt"}) == [
        "other: got 1, expected nothing"
    ]


def test_the_environment_is_really_read():
    assert installed_packages()["numpy"] == locked_packages()["numpy"].version


# --- Pythons and machines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", PYTHONS)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_python_and_machine_gets_each_package_once(version, machine):
    here = {"python_version": version, "python_full_version": f"{version}.1", "platform_machine": machine}
    pins = [pin for path in INSTALLED for pin in read_pins(path).values()]
    names = [pin.name for pin in pins if not pin.marker or Marker(pin.marker).evaluate(here)]
    assert len(names) == len(pins) - 1  # onnxruntime has one name on each machine
    assert ("onnxruntime-gpu" in names) == (machine == "x86_64") and ("onnxruntime" in names) == (machine == "aarch64")


@pytest.mark.parametrize(
    ("needed", "text"),
    [
        (set(TARGETS), ""),
        ({target for target in TARGETS if target[1] == "aarch64"}, "platform_machine == 'aarch64'"),
        ({target for target in TARGETS if target[0] == "3.11"}, "python_version == '3.11'"),
        (
            {target for target in TARGETS if target[0] in ("3.11", "3.12")},
            "python_version == '3.11' or python_version == '3.12'",
        ),
        ({("3.12", "x86_64")}, "python_version == '3.12' and platform_machine == 'x86_64'"),
        ({("3.11", "x86_64"), ("3.12", "aarch64")}, None),
        (set(TARGETS) - {("3.11", "aarch64")}, None),
    ],
    ids=["all", "machine", "python", "two pythons", "one target", "a diagonal", "all but one"],
)
def test_a_marker_is_true_for_the_targets_that_need_the_package_alone(monkeypatch, needed, text):
    written = marker(needed)
    assert text is None or written == text
    for python, machine in TARGETS:
        here = {"python_version": python, "platform_machine": machine}
        expected = (python, machine) in needed
        assert not written or Marker(written).evaluate(here) == expected
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        monkeypatch.setattr(sys, "version_info", (*map(int, python.split(".")), 1))
        assert applies_here(written) == expected


def test_setup_counts_what_it_installs():
    assert {pin.name for path in INSTALLED if path != CUDA for pin in pins_for_this_machine(path)} <= {
        *installed_packages()
    }


@pytest.fixture
def make_setup(tmp_path):
    """Runs `make setup` in an empty folder with only these commands on PATH. Each is a shell script."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sh", "sed", "expand", "touch"):
        commands.joinpath(name).symlink_to(shutil.which(name))
    for name in ("Makefile", "pyproject.toml", "locks"):
        tmp_path.joinpath(name).symlink_to(ROOT / name)

    def run(*arguments: str, **scripts: str) -> subprocess.CompletedProcess[str]:
        for name, script in scripts.items():
            (commands / name).write_text(f"#!{shutil.which('sh')}\n{script}\n")
            (commands / name).chmod(0o755)
        environment = {"PATH": str(commands), "SHELL": "/bin/sh"}
        command = [shutil.which("make"), "setup", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def python_of(version: str) -> str:
    """A script that answers as a Python of that version would, and prints how it was called when asked for venv."""
    major, minor = version.split(".")
    code = f"import sys; sys.version_info = ({major}, {minor}, 0); exec(sys.argv[1])"
    return (
        'if [ "$1" = -c ] && [ "$2" = "import ensurepip, venv" ]; then exit 0; fi\n'
        f'if [ "$1" = -c ]; then exec {sys.executable} -c "{code}" "$2"; fi\n'
        f'echo "{version} was asked for $2"; exit 7'
    )


def test_make_takes_the_first_python_that_runs_and_is_supported(make_setup):
    broken = "echo 'python3.11: command not found' >&2; exit 127"  # as a version manager answers
    result = make_setup(**{"python3.11": broken, "python3.13": python_of("3.13"), "python3": python_of("3.9")})
    assert "3.13 was asked for venv" in result.stdout and "command not found" not in result.stderr


def test_make_takes_python3_where_it_is_supported(make_setup):
    assert "3.12 was asked for venv" in make_setup(python3=python_of("3.12")).stdout


@pytest.mark.parametrize("version", ["3.10", "3.99", "2.7"])
def test_make_refuses_another_python_and_names_the_fix(make_setup, version):
    result = make_setup(python3=python_of(version))
    expected = f"python: python3 is Python {version}, expected one of {' '.join(PYTHONS)}; "
    assert result.returncode and expected in result.stderr and "make setup PYTHON=/path/to/" in result.stderr
    assert "asked for venv" not in result.stdout


def test_make_without_any_python_names_the_fix(make_setup):
    result = make_setup()
    assert result.returncode
    assert "python: got no python3 here, expected one of Python 3.11 " in result.stderr
    assert "make setup PYTHON=/path/to/" in result.stderr


# --- what setup prints ------------------------------------------------------------------------------------------------


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """Puts a script in the place of pip; gives the log that setup writes."""
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "LOG", tmp_path / "build" / "setup.log")
    monkeypatch.setattr(install, "install_torch", lambda version: None)
    (tmp_path / "pip.py").write_text("import sys; print('WARNING: noise', sys.argv[1])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_setup_prints_one_line_for_a_step_and_pip_writes_to_the_log(pip, capfd):
    install.main()
    captured = capfd.readouterr()
    assert captured.err == ""
    first, *steps = captured.out.splitlines()
    assert "build/setup.log" in first
    assert [line.split()[0] for line in steps] == ["1/5", "2/5", "5/5"]  # 3 and 4 are those of torch
    assert steps[0] == "1/5 build tools (1) ... 0 s"
    assert (pip / "build/setup.log").read_text().count("WARNING: noise install") == 3


def test_a_step_that_fails_shows_the_last_lines_and_the_log(pip, capfd):
    (pip / "pip.py").write_text("for n in range(100): print('line', n)\nraise SystemExit('no such host')")
    with pytest.raises(SystemExit) as error:
        install.main()
    assert capfd.readouterr().out.splitlines()[-1] == "1/5 build tools (1) ... failed"
    message = str(error.value)
    assert "    line 99\n    no such host\nsetup: " in message
    assert "line 10\n" not in message
    assert "got exit code 1, expected 0; its whole output is in build/setup.log; fix" in message
    assert "line 10\n" in (pip / "build/setup.log").read_text()


# --- torch ------------------------------------------------------------------------------------------------------------


def test_an_unlisted_build_of_torch_is_refused_by_its_hash(tmp_path):
    wheel = tmp_path / "torch-2.13.0+mine-cp311-cp311-linux_x86_64.whl"
    wheel.write_bytes(b"not torch")
    with pytest.raises(SystemExit, match=r"2\.13\.0\+mine.* with SHA-256 .*BLOCKLINE_TORCH=any"):
        check_torch(wheel)


@pytest.mark.parametrize(
    ("asks_for", "files"),
    [("filelock", [TORCH]), ("triton==3.7.1; platform_system == 'Linux'", [TORCH, CUDA])],
    ids=["cpu", "cuda"],
)
def test_setup_installs_the_libraries_of_the_build_of_torch_that_pip_finds(monkeypatch, asks_for, files):
    installed = []

    def pip(command, *arguments):
        if command == "download":
            (Path(arguments[arguments.index("--dest") + 1]) / "torch-2.13.0.whl").write_bytes(b"")
        else:
            installed.append(arguments[arguments.index("-r") + 1])

    monkeypatch.setattr(install, "_pip", pip)
    monkeypatch.setattr(install, "check_torch", lambda wheel: None)
    monkeypatch.setattr(install.importlib.metadata, "requires", lambda name: ["typing-extensions>=4.10.0", asks_for])
    install.install_torch("2.13.0")
    assert installed == files


def test_the_cuda_build_of_torch_brings_its_libraries_and_the_cpu_build_none():
    assert not asks_for_cuda(["filelock", "typing-extensions>=4.10.0", 'optree>=0.13.0; extra == "optree"'])
    assert asks_for_cuda(["filelock", 'nvidia-nccl-cu13==2.29.7; platform_system == "Linux"'])
    assert asks_for_cuda(['triton==3.7.1; platform_system == "Linux"'])


def test_torch_and_its_libraries_are_not_installed_with_the_rest():
    assert set(read_pins(TORCH)) == {"torch"}
    assert not set(read_pins(PACKAGES)) & {*read_pins(TORCH), *read_pins(CUDA)}
    assert TORCH.read_text().count("--hash=") > 2  # every build that the usual index has, and the tests' own
