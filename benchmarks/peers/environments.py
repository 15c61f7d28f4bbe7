"""Virtual environments of the peers, in build/peers. The peers need other versions of packages than ours.

python -m benchmarks.peers.environments [NAME ...]      makes the named environments; all of them by default
"""

from __future__ import annotations

import argparse
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
# pip compiles llama.cpp for this processor, which takes minutes.
_OFF = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_TOOLS", "LLAMA_CURL")
BUILD_SETTINGS = {"llama_cpp": {"CMAKE_ARGS": " ".join(["-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in _OFF)])}}


class PeerMissing(RuntimeError):
    """A peer's environment cannot be made on this machine; the message ends with the installer's last line."""


def is_ready(name: str) -> bool:
    """Whether a peer's environment is made and has the packages that `PACKAGES` names today."""
    ready = _ready_file(name)
    return ready.is_file() and ready.read_text() == json.dumps(PACKAGES[name])


def prepare(name: str) -> Path:
    """Returns the Python of a peer's environment; makes the environment first where it is missing or out of date.

    Raises:
        PeerMissing: pip cannot install the packages.
    """
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    if is_ready(name):
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name]]
    installed = subprocess.run(command, capture_output=True, text=True, env=os.environ | BUILD_SETTINGS.get(name, {}))
    if installed.returncode:
        last = installed.stderr.strip().splitlines()[-1:]
        raise PeerMissing(f"peer {name}: {' '.join(PACKAGES[name])} cannot be installed: {last}")
    _ready_file(name).write_text(json.dumps(PACKAGES[name]))
    return python


def _ready_file(name: str) -> Path:
    """The file that an environment has once it is whole: its packages as JSON."""
    return ENVIRONMENTS / name / ".ready"


def generate(name: str, arguments: Sequence[str], prompts: Sequence[Sequence[int]], n_tokens: int) -> list[list[int]]:
    """Returns a peer's greedy tokens: runs its script with the prompts on stdin.

    Args:
        name: a peer with a script NAME_generate.py in this folder.
        arguments: the script's arguments, without the number of tokens.
        prompts: token ids of each prompt.
        n_tokens: number of tokens after each prompt.

    Raises:
        PeerMissing: the environment cannot be made.
        RuntimeError: the script failed; the message has its stderr.
    """
    command = [str(prepare(name)), str(SCRIPTS / f"{name}_generate.py"), *arguments, str(n_tokens)]
    stdin = json.dumps([list(map(int, prompt)) for prompt in prompts])
    run = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: {run.stderr[-2000:]}")
    return json.loads(run.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the named environments; exits with 1 where one cannot be made, after it has tried the others."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.environments", description="Make the peers' environments in build/peers."
    )
    names = ", ".join(PACKAGES)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"environments to make: {names} (default: all)")
    wanted = parser.parse_args(arguments).names or list(PACKAGES)
    if unknown := set(wanted) - set(PACKAGES):
        parser.error(f"NAME: got {', '.join(sorted(unknown))}, expected some of {names}")
    failed = False
    for name in wanted:
        try:
            print(f"{name}: {prepare(name)}", flush=True)
        except PeerMissing as reason:
            print(reason, file=sys.stderr, flush=True)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
