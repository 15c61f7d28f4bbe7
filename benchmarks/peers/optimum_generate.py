"""Generates greedy tokens with optimum.

optimum_generate.py BUNDLE CHECKPOINT N

It reads prompts (lists of token ids) as JSON from stdin and writes N tokens of each as JSON to stdout.

All prompts are one left-padded batch. A bundle has no config.json, so the checkpoint's is used.
"""

import json
import sys

import onnxruntime
import torch
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoConfig, GenerationConfig


def main() -> None:
    folder, checkpoint, n_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    prompts = json.load(sys.stdin)
    config = AutoConfig.from_pretrained(checkpoint)
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
    model = ORTModelForCausalLM(
        config=config,
        session=session,
        use_io_binding=False,
        generation_config=GenerationConfig.from_model_config(config),
    )
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    tokens = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=n_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    json.dump(tokens[:, longest:].tolist(), sys.stdout)


if __name__ == "__main__":
    main()
