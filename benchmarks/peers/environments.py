"""Makes the peers' environments under build/peers/: they need other versions of the packages that we use.

python -m benchmarks.peers.environments [NAME ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / "build" / "peers"
SCRIPTS = Path(__file__).parent

PACKAGES = {
    "genai": ["onnxruntime-genai==0.18.0", "onnxruntime==1.32.0"],
    "genai_builder": [
        "onnxruntime-genai==0.18.0",
        "onnxruntime==1.32.0",
        "torch==2.13.0",
        "transformers==5.24.0",
        "onnx==1.23.2",
        "onnx-ir==1.1.0",
    ],
    "optimum": [
        "optimum-onnx[onnxruntime]==0.1.0",
        "optimum==2.1.0",
        "transformers==4.57.6",
        "onnxruntime==1.32.0",
        "torch==2.13.0",
    ],
    "llama_cpp": ["llama-cpp-python==0.3.36", "gguf==0.19.0", "numpy==2.4.6", "safetensors==0.8.0"],
}
# llama.cpp is compiled here, for this processor; it takes minutes.
BUILD_SETTINGS = {
    "llama_cpp": {
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_CURL=OFF"
    },
}


class PeerMissing(RuntimeError):
    """A peer's environment cannot be made here; the message has the installer's last words."""


def prepare(name: str) -> Path:
    """The Python of a peer's environment, made on first use; one that was left half made is made again.

    Raises:
        PeerMissing: its packages cannot be installed.
    """
    folder = ENVIRONMENTS / name
    ready, python = folder / ".ready", folder / "bin" / "python"
    wanted = json.dumps(PACKAGES[name])
    if ready.is_file() and ready.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name]]
    installed = subprocess.run(command, capture_output=True, text=True, env=os.environ | BUILD_SETTINGS.get(name, {}))
    if installed.returncode:
        raise PeerMissing(
            f"peer {name}: {' '.join(PACKAGES[name])} cannot be installed: {installed.stderr.strip().splitlines()[-1:]}"
        )
    ready.write_text(wanted)
    return python


def generate(name: str, arguments: Sequence[str], prompts: Sequence[Sequence[int]], n_tokens: int) -> list[list[int]]:
    """Greedy tokens of a peer: runs its script with the prompts on stdin.

    Raises:
        PeerMissing: the environment cannot be made.
        RuntimeError: the script failed; the message has its stderr.
    """
    command = [str(prepare(name)), str(SCRIPTS / f"{name}_generate.py"), *arguments, str(n_tokens)]
    run = subprocess.run(
        command, input=json.dumps([list(map(int, prompt)) for prompt in prompts]), capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: {run.stderr[-2000:]}")
    return json.loads(run.stdout)


if __name__ == "__main__":
    for peer in sys.argv[1:] or PACKAGES:
        print(f"{peer}: {prepare(peer)}")
