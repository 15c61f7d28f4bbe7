"""Makes genai_config.json, which onnxruntime-genai needs beside a graph whose cache grows."""

from __future__ import annotations

from exporter.spec.catalogue import ModelConfig

TOKEN_KEYS = ("bos_token_id", "pad_token_id")  # the checkpoint's own; a manifest does not have them


def genai_config(
    config: ModelConfig,
    max_positions: int,
    end_token_ids: tuple[int, ...],
    graph_file: str,
    begin_token_id: int | None = None,
    pad_token_id: int | None = None,
) -> dict:
    """Returns the configuration that onnxruntime-genai reads (documented at
    onnxruntime.ai/docs/genai/reference/config).

    Past and present are separate tensors, so `past_present_share_buffer` is false. A graph has rotations for
    2 · max_positions positions, but a sequence has at most max_positions tokens.

    A checkpoint without a begin token gives no `bos_token_id`. One without a pad token gives its end token, as genai's
    own model builder does: genai would take token 0, and hide that token wherever a prompt has it.
    """
    end = list(end_token_ids)
    pad = end[0] if pad_token_id is None and end else pad_token_id
    tokens = {
        "bos_token_id": begin_token_id,
        "eos_token_id": end[0] if len(end) == 1 else end,
        "pad_token_id": pad,
    }
    return {
        "model": {
            "type": "llama",
            **{key: value for key, value in tokens.items() if value is not None},
            "context_length": max_positions,
            "vocab_size": config.vocab_size,
            "decoder": {
                "session_options": {"provider_options": []},
                "filename": graph_file,
                "head_size": config.head_dim,
                "hidden_size": config.hidden_size,
                "num_attention_heads": config.n_heads,
                "num_key_value_heads": config.n_kv_heads,
                "num_hidden_layers": config.n_layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "position_ids": "position_ids",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": max_positions, "past_present_share_buffer": False, "do_sample": False},
    }
