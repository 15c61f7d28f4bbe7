#!/usr/bin/env bash
# Compiles the block that scripts/polygraphy_block.sh exports with trtexec. Needs TensorRT's trtexec and a GPU.
# TRTEXEC names the program; with TensorRT 10 give --stronglyTyped as an argument.
set -euo pipefail

heads=3 head_dim=64 hidden=576 capacity=1024
cache="1x${heads}x${capacity}x${head_dim}"

shapes() { # shapes MASK_LENGTH: every input of the graph, for a step of one token
    echo "hidden_states:1x1x$hidden,position_ids:1x1,write_indices:1,attention_mask:1x$1,\
past_key_values.0.key:$cache,past_key_values.0.value:$cache"
}

"${TRTEXEC:-trtexec}" --onnx="build/block/model.c$capacity.onnx" --saveEngine=build/block.engine \
    --minShapes="$(shapes 1)" --optShapes="$(shapes 512)" --maxShapes="$(shapes "$capacity")" "$@"
