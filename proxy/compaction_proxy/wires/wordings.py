"""The words in which providers say that a request does not fit, as data.

Texts are matched in lower case, with single spaces and without back quotes. Rules are tried in order and the
first that matches decides, so those that tell numbers come before those that tell none.
"""

import re
from typing import Final

_MAX_DIGITS: Final = 9
_NUMBER: Final = rf"(?<!\d)(?P<%s>\d{{1,3}}(?:[,._' ]\d{{3}}){{1,2}}|\d{{1,{_MAX_DIGITS}}})(?!\d)"


def _rule(wording: str) -> re.Pattern[str]:
    """A wording with `{limit}`, `{used}` and `{output}` for numbers, in lower case and single spaces.

    Gaps are bounded and nothing that repeats without bound is repeated, so that matching stays linear.
    """
    return re.compile(re.sub(r"\{([a-z]+)\}", lambda name: _NUMBER % name[1], wording))


CODES: Final = re.compile(
    r"\b(?:context_length_exceeded|context_window_exceeded|model_context_window_exceeded"
    r"|exceed_context_size_error|context_exceeded|prompt_too_long|input_too_long)\b"
)
EXCLUDED: Final = re.compile(
    r"rate.?limit|too many requests|quota|overloaded|throttl|please wait before|too many tools"
    r"|string too long\. expected a string with maximum length"
)
PER_MINUTE: Final = re.compile(r"tokens per min|\(tpm\)")
QUOTA: Final = (
    _rule(r"request too large.{0,300}?limit:? {limit}.{0,40}?requested:? {used}"),
    re.compile(r"request too large"),
)
BYTES: Final = re.compile(
    r"request[ _](?:entity[ _])?too[ _]large|payload ?too ?large|content too large|body too large"
    r"|request exceeds the maximum size|request_too_large"
)

SUM: Final = _rule(r"context length (?:is|of) {limit} tokens.{0,120}?requested.{0,60}?(?:\(|tokens: )")
SUM_ENDS: Final = re.compile(r"\)|\. ")
SHARE: Final = _rule(r"{count} (?:tokens )?(?:in|of|for|from) (?:the |your )?(?P<what>[a-z]{1,12})")
OUTPUT_SHARES: Final = frozenset({"completion", "output"})

_WINDOW: Final = r"maximum context length (?:is|of) {limit}(?: tokens)?"
RULES: Final = (
    # vLLM
    _rule(_WINDOW + r"\. however, your request has {used} input tokens plus {output} 'max_tokens'"),
    _rule(r"is too large: {output}\. this model's " + _WINDOW + r" and your request has {used} input tokens"),
    _rule(_WINDOW + r"\. however, you requested {output} output tokens and your prompt contains at least \d"),
    _rule(
        _WINDOW
        + r"\. however, you requested {output} output tokens and your prompt contains {used} input tokens"
    ),
    _rule(r"prompt \(length {used}\) is longer than the maximum model length of {limit}"),
    _rule(r"max_tokens must be at least 1, got -\d"),
    # OpenAI, Azure, and whoever took over their wording
    _rule(_WINDOW + r".{0,80}?(?:resulted in|your request has|contains) (?:about )?{used} (?:input )?tokens"),
    _rule(_WINDOW + r".{0,80}?requested (?:about )?{used} tokens in the messages"),
    _rule(r"input tokens exceed the configured limit of {limit} tokens.{0,80}?resulted in {used} tokens"),
    _rule(_WINDOW),
    # Anthropic, Fireworks
    _rule(r"prompt is too long:? {used} tokens > {limit} maximum"),
    _rule(r"input length and max_tokens exceed context limit: {used} \+ {output} > {limit}"),
    _rule(r"prompt is too long: {used}, model maximum context length:? {limit}"),
    # Gemini, Mistral, xAI, Copilot, Cerebras, Kimi, Poolside, Together
    _rule(r"input token count \(?{used}\)? exceeds the maximum number of tokens allowed \(?{limit}"),
    _rule(r"input token count exceeds the maximum number of tokens allowed \(?{limit}"),
    _rule(r"prompt contains {used} tokens.{0,80}?too large for model with {limit} maximum context length"),
    _rule(r"maximum prompt length is {limit} but the request contains {used}"),
    _rule(r"prompt token count of {used} exceeds the limit of {limit}"),
    _rule(r"current length is {used} while limit is {limit}"),
    # Its number counts the output asked for, too.
    _rule(r"exceeded model token limit: {limit}"),
    _rule(r"input length {used} exceeds the maximum allowed input length of {limit}"),
    _rule(r"input \({used} tokens\) is longer than the model'?s context length \({limit} tokens"),
    # llama.cpp (the second is its fields), llama-cpp-python, LM Studio, TGI
    _rule(r"request \({used} tokens\) exceeds the available context size \({limit} tokens"),
    _rule(r"n_prompt_tokens {used} n_ctx {limit}"),
    _rule(r"requested tokens \({used}\) exceed context window of {limit}"),
    _rule(r"greater than the context length \(n_keep: {used} ?>= n_ctx: {limit}"),
    _rule(
        r"trying to keep the first {used} tokens when context the overflows"
        r".{0,200}?context length of only {limit}"
    ),
    _rule(
        r"inputs tokens \+ max_new_tokens must be <= {limit}\."
        r" given: {used} inputs tokens and {output} max_new_tokens"
    ),
    _rule(r"inputs must have less than {limit} tokens\. given: {used}"),
    # Without numbers
    _rule(
        r"exceeds? the (?:model(?:'?s)? )?context window|context window exceeds limit"
        r"|exceeds? the available context size|prompt is too long|prompt too long; exceeded"
        r"|input is too long for requested model|reduce the length of the messages"
        r"|total length of all messages is too long|exceeds the model'?s maximum context length"
        r"|tokens to keep from the initial prompt is greater than the context length"
    ),
)
# Ollama cuts from the front in silence; a template that then misses the user's message fails like this.
CUT_AWAY: Final = _rule("no user query found in messages")
