"""SmolLM2-135M, trained weights, against transformers' own LlamaForCausalLM: same logits, same tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exporter.bundle.chat_template import read_chat_template
from exporter.bundle.tokenizer import encode_chat
from runtime import DecodeSession
from runtime.text.chat import Chat
from runtime.text.generation import Generation, generate
from runtime.text.sampling import Sampler
from runtime.text.sequence import GeneratedSequence
from runtime.text.stopping import StopRules

pytestmark = pytest.mark.slow

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Question: What is the largest planet? Answer:",
    "She opened the door and saw",
]  # more of them, and more tokens, in benchmarks/records/agreement.json


@pytest.fixture(scope="module")
def oracle(smollm2_checkpoint):
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.LlamaForCausalLM.from_pretrained(smollm2_checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2_checkpoint):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(smollm2_checkpoint / "tokenizer.json"))


@pytest.fixture(scope="module")
def session(smollm2_bundle):
    with DecodeSession.open(smollm2_bundle("fp32").folder, max_batch=2, cache_capacity=512) as session:
        yield session


@pytest.mark.parametrize("length", [5, 37, 200])
def test_logits_equal_transformers_at_prefill_and_decode(session, oracle, length):
    ids = np.random.default_rng(length).integers(0, session.manifest.config.vocab_size, (1, length + 1))
    with torch.inference_mode():
        expected = oracle(torch.from_numpy(ids)).logits.numpy()
    session.reset()
    assert np.abs(session.prefill(ids[:, :-1]) - expected[:, -2]).max() < 1e-3
    assert np.abs(session.decode(ids[:, -1]) - expected[:, -1]).max() < 1e-3


@pytest.mark.parametrize("prompt", PROMPTS)
def test_32_greedy_tokens_equal_transformers(session, oracle, tokenizer, prompt):
    ids = tokenizer.encode(prompt).ids
    with torch.inference_mode():
        expected = oracle.generate(
            torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=[], pad_token_id=0
        )[0, len(ids) :]
    session.reset()
    logits, got = session.prefill(np.array([ids])), []
    for _ in range(32):
        got.append(int(logits[0].argmax()))
        logits = session.decode(np.array([got[-1]]))
    assert got == expected.tolist()


def test_the_known_prompt_has_the_known_tokens_and_goes_on_with_paris(session, tokenizer):
    ids = tokenizer.encode(PROMPTS[0]).ids
    assert ids == [504, 3575, 282, 4649, 314]
    session.reset()
    assert tokenizer.decode(list(Generation(session, ids, 2, Sampler()))) == " Paris."


def test_a_chat_with_the_model_reads_like_one(session, tokenizer, smollm2_bundle):
    """Two chats at once come back in order; a stop string that is spread over tokens stops."""
    chat = Chat(read_chat_template(smollm2_bundle("fp32")))
    questions = ["What is the capital of France?", "What is the largest planet of the solar system?"]
    prompts = [encode_chat(tokenizer, chat.render([{"role": "user", "content": text}])) for text in questions]

    def answers(*stop: str) -> list[GeneratedSequence]:
        rules = StopRules(40, stop)
        sequences = [GeneratedSequence(prompt, Sampler(), rules, (2,), tokenizer) for prompt in prompts]
        session.reset()
        for _ in generate(session, sequences):
            pass
        return sequences

    france, planet = answers()
    assert (france.text, france.stopped_by) == ("The capital of France is Paris.", "end token")
    assert "Jupiter" in planet.text
    stopped, _ = answers("al of Fran")
    assert (stopped.text, stopped.stopped_by) == ("The capit", "stop string")
    assert tokenizer.encode("The capital of France").tokens == ["The", "Ġcapital", "Ġof", "ĠFrance"]


def test_the_template_renders_as_transformers_renders_it(smollm2_bundle, smollm2_checkpoint):
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_checkpoint)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert Chat(read_chat_template(smollm2_bundle("fp32"))).render(messages) == expected


def test_the_half_precision_model_says_paris_too(smollm2_bundle, tokenizer):
    bundle = smollm2_bundle("fp16")
    assert bundle.read_report()["validation"]["passed"]
    with DecodeSession.open(bundle.folder, cache_capacity=64) as session:
        assert tokenizer.decode(list(Generation(session, tokenizer.encode(PROMPTS[0]).ids, 2, Sampler()))) == " Paris."


def test_the_bundle_takes_the_tokenizer_and_end_token_along(smollm2_bundle):
    manifest = smollm2_bundle("fp32").manifest
    assert "tokenizer.json" in manifest.files and manifest.end_token_ids == (2,)
    assert manifest.weights == {"source": "checkpoint"}
    assert not (smollm2_bundle("fp32").folder / "config.json").exists()
