"""Quantizes a GGUF file with llama.cpp.

llama_cpp_quantize.py SOURCE TARGET TYPE      TYPE is the end of a name LLAMA_FTYPE_MOSTLY_TYPE
"""

import sys

import llama_cpp


def main() -> None:
    source, target, kind = sys.argv[1:]
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    status = llama_cpp.llama_model_quantize(source.encode(), target.encode(), parameters)
    if status:
        raise SystemExit(f"llama.cpp: quantizing {source} to {kind} failed with status {status}")


if __name__ == "__main__":
    main()
