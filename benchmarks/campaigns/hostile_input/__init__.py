"""Hostile input: files and arguments that a stranger made, thousands of them from a seed, opened through every door there is.

values      hostile numbers, texts and trees; mutations of JSON
originals   good bundles and checkpoints that the mutations start from
graphs      model.onnx, its external data, model.onnx.data
bundles     manifest.json, report.json, engines.json, the tokenizer, engine files
checkpoints config.json, safetensors, shard indices, params.json, .pth
arguments   command lines and prompts
doors       what is opened: library calls and commands
gates       how far each case came
sandbox     the folder of a case, its secrets, and what must not have happened to them
worker      runs cases in a process of its own
campaign    watches workers: time, memory, crashes; sums up
"""
