"""Two exports of the same model are the same bytes for every user, place, time and language.

None of these is in the bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from exporter.commands.main import main
from tests.conftest import ROOT, TINY
from tests.support.bundle_folders import IDENTITY_FILES, contents
from tests.support.checkpoint_folders import write_huggingface

pytestmark = pytest.mark.slow

EXPORTS = {
    "block": ["--dtype", "bf16"],
    "parts": ["--unit", "stack", "--layers", "2", "--parts", "2"],
}
USER, HOST, YEAR, SECONDS = "planteduser", "planted-host", "2033", "2000000000"  # 2033-05-18 in UTC
ELSEWHERE = f"""
import json, os, socket, sys, time
from exporter.commands.main import main
time.time = lambda: {SECONDS}.25
time.time_ns = lambda: {SECONDS}_250_000_000
socket.gethostname = lambda: "{HOST}"
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""


def export_arguments(checkpoint: Path, folder: Path) -> dict[str, list[str]]:
    common = ["export", "--checkpoint", str(checkpoint), "--no-validate"]
    return {name: [*common, *arguments, "-o", str(folder / name)] for name, arguments in EXPORTS.items()}


def identity(folder: Path) -> dict[str, bytes]:
    """Returns path → content of manifest, graphs and data below a folder."""
    return {name: content for name, content in contents(folder).items() if Path(name).name in IDENTITY_FILES}


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, Path]:
    """The same two exports, made here and by another process with another user, place, time and language."""
    here = tmp_path_factory.mktemp("here")
    for arguments in export_arguments(write_huggingface(here / "checkpoint", TINY), here / "bundles").values():
        assert main(arguments) == 0
    away = tmp_path_factory.mktemp("far away") / USER
    for folder in ("home", "scratch", "working"):
        (away / folder).mkdir(parents=True)
    shutil.copytree(here / "checkpoint", away / "checkpoint")
    environment = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"LC_ALL": "C", "LANG": "tr_TR.UTF-8", "TZ": "Pacific/Chatham", "USER": USER, "LOGNAME": USER}
    environment |= {"HOME": str(away / "home"), "TMPDIR": str(away / "scratch"), "HOSTNAME": HOST}
    arguments = list(export_arguments(away / "checkpoint", away / "bundles").values())
    command = [sys.executable, "-c", ELSEWHERE, json.dumps(arguments)]
    result = subprocess.run(command, cwd=away / "working", env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return here / "bundles", away / "bundles"


def test_another_process_elsewhere_at_another_time_exports_the_same_bytes(exported):
    here, away = map(identity, exported)
    assert len(here) == 3 + 5 and here.keys() == away.keys()
    assert [name for name in here if here[name] != away[name]] == []


def test_no_place_person_host_or_time_is_in_them(exported):
    here, away = exported
    folders = [str(here), str(away), str(ROOT), os.path.expanduser("~"), str(Path(sys.prefix).resolve())]
    names = [*folders, USER, HOST, socket.gethostname()]
    places = [part for name in names for part in (name, name.lstrip("/")) if len(part) >= 6]
    assert len(places) >= 10
    for name, content in identity(away).items():
        assert [place for place in places if place.encode() in content] == [], name
        if not name.endswith(".data"):  # weights may contain any bytes
            found = re.findall(rb"\b(?:20[0-9]{2}-[01][0-9]-[0-3][0-9]|" + SECONDS.encode() + rb")", content)
            assert found == [] and YEAR.encode() not in re.sub(rb"[0-9a-f]{64}", b"", content), name
