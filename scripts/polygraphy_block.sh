#!/usr/bin/env bash
# Exports one SmolLM2 block, compiles it with Polygraphy over TensorRT-RTX, and compares onnxruntime with saved outputs.
# Needs `pip install 'blockline[polygraphy]'` and no GPU. Writes below build/ of the current folder.
set -euo pipefail

heads=3 head_dim=64 hidden=576 capacity=1024
cache="[1,$heads,$capacity,$head_dim]"

shapes() { # shapes MASK_LENGTH: every input of the graph, for a step of one token
    echo "hidden_states:[1,1,$hidden] position_ids:[1,1] write_indices:[1] attention_mask:[1,$1]" \
        "past_key_values.0.key:$cache past_key_values.0.value:$cache"
}

python -m exporter export --model smollm2-135m -o build/block
python -m engines  build  build/block --cache-capacity "$capacity"

export POLYGRAPHY_USE_TENSORRT_RTX=1 # Polygraphy's own switch to tensorrt-rtx
polygraphy inspect model "build/block/model.c$capacity.onnx"
# shellcheck disable=SC2046 # each shape is one argument
polygraphy convert "build/block/model.c$capacity.onnx" --convert-to trt -o build/block.engine \
    --trt-min-shapes $(shapes 1) --trt-opt-shapes $(shapes 512) --trt-max-shapes $(shapes "$capacity")

python -m engines compare build/block --save-inputs build/inputs.json --save-outputs build/outputs.json
polygraphy run build/block/model.onnx --onnxrt --load-inputs build/inputs.json --save-outputs build/onnxruntime.json
python -m engines compare-outputs build/block build/outputs.json build/onnxruntime.json --atol 0.02 --rtol 0.02
