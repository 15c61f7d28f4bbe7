"""Generates greedy tokens with onnxruntime-genai.

genai_generate.py BUNDLE N

It reads prompts (lists of token ids) as JSON from stdin and writes N tokens of each as JSON to stdout.
"""

import json
import sys

import onnxruntime_genai as genai


def main() -> None:
    folder, n_tokens = sys.argv[1], int(sys.argv[2])
    model, results = genai.Model(folder), []
    for prompt in json.load(sys.stdin):
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=len(prompt) + n_tokens, do_sample=False)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(prompt)
        tokens = []
        while len(tokens) < n_tokens and not generator.is_done():
            generator.generate_next_token()
            tokens.append(int(generator.get_next_tokens()[0]))
        results.append(tokens)
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
