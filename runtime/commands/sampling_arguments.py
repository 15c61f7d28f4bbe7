"""The arguments of a command that choose how tokens are drawn and when a text ends."""

from __future__ import annotations

import argparse

from exporter.common.errors import InputError
from runtime.text.sampling import Sampler
from runtime.text.stopping import StopRules

MAX_NEW_TOKENS, MAX_NEW_TOKENS_OF_A_CHAT = 64, 256


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `read_sampler` and `read_stop_rules` read."""
    group = parser.add_argument_group("how tokens are drawn")
    greedy = "0 takes the likeliest token (default without --top-k, --top-p and --min-p, which need one above 0)"
    group.add_argument("--temperature", type=float, metavar="X", help=greedy)
    group.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest tokens")
    top_p = "draw from the likeliest tokens that reach probability X"
    group.add_argument("--top-p", type=float, metavar="X", help=top_p)
    min_p = "draw from the tokens that are at least X times as likely as the likeliest"
    group.add_argument("--min-p", type=float, metavar="X", help=min_p)
    repetition = "above 1 makes tokens of the prompt and the text less likely (default 1)"
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help=repetition)
    presence = "-2 to 2, subtracted from the logits of tokens that the text has (default 0)"
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help=presence)
    frequency = "-2 to 2, the same for each time that the text has the token (default 0)"
    group.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X", help=frequency)
    bias = "add X to the logit of token ID; may be given several times"
    group.add_argument("--logit-bias", action="append", default=[], metavar="ID=X", help=bias)
    seed = "seed for the random draws (default: a new one, which is printed)"
    group.add_argument("--seed", type=int, metavar="N", help=seed)
    group = parser.add_argument_group("when a text ends")
    most = f"most tokens to add (default {MAX_NEW_TOKENS}, {MAX_NEW_TOKENS_OF_A_CHAT} in a chat)"
    group.add_argument("--max-new-tokens", type=int, metavar="N", help=most)
    stop = "end the text before TEXT; may be given several times"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    token = "end the text at token ID too; may be given several times"
    group.add_argument("--stop-token", action="append", type=int, default=[], metavar="ID", help=token)
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end tokens")


def read_sampler(arguments: argparse.Namespace) -> Sampler:
    """Returns the sampler that the arguments describe. Without --seed it draws one."""
    return Sampler(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        seed=arguments.seed,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        logit_bias=dict(_bias(text) for text in arguments.logit_bias),
    )


def read_stop_rules(arguments: argparse.Namespace, in_chat: bool) -> StopRules:
    """Returns when a text ends.

    Args:
        arguments: the arguments of the command.
        in_chat: whether the text is an answer in a chat.
    """
    default = MAX_NEW_TOKENS_OF_A_CHAT if in_chat else MAX_NEW_TOKENS
    most = default if arguments.max_new_tokens is None else arguments.max_new_tokens
    return StopRules(most, arguments.stop, arguments.stop_token, arguments.ignore_eos)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InputError(f"--logit-bias: got {text!r:.80}, expected ID=X, such as 15043=-100") from None
