"""The fields of requests in OpenAI's form: which are known, which change nothing, their limits and checks."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3 import InputError, Model
from qwen3_lib.generation.messages import TooLong
from qwen3_lib.generation.options import OPTION_NAMES, AnswerOptions, options_of
from qwen3_lib.generation.tools import Value
from qwen3_lib.io.errors import brief, did_you_mean, is_whole

Body = dict[str, Any]
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(InputError):
    """A request that gets this status and message; `param` is the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def value(self) -> Value:
        """The object that the client gets."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": brief(self, 2000), "type": kind, "param": self.param, "code": self.code}}


MOST_CHOICES, MOST_LOGPROBS, MOST_PROMPTS = 8, 20, 128
MOST_BIASES, LONGEST_SALT = 2**15, 1024  # tokens of logit_bias; characters of cache_salt
RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "n_predict": "max_new_tokens",
           "max_output_tokens": "max_new_tokens", "thinking_budget": "think_budget",
           "repeat_penalty": "repetition_penalty"}
OURS = tuple(name for name in OPTION_NAMES if name not in ("schema", "logprobs", "lookup", "draft", "max_pixels"))
REQUEST_OPTIONS = (*OURS, "ignore_eos", "cache_salt", *RENAMED)
SHARED_FIELDS = (*REQUEST_OPTIONS, "stream", "enable_thinking", "chat_template_kwargs")
BOTH = (*REQUEST_OPTIONS, "n", "stream", "stream_options", "logprobs")
CHAT = (*BOTH, "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "schema", "top_logprobs",
        "enable_thinking", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt",
        "continue_final_message")
COMPLETION_FIELDS = (*BOTH, "prompt", "echo", "best_of")
# Clients send these, and they don't change an answer.
IGNORED_FIELDS = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
                  "verbosity",
            "prompt_cache_retention", "prediction", "cache_prompt", "include_reasoning", "timings_per_token",
            "return_progress", "chat_id", "session_id", "id", "id_slot", "request_id", "priority", "keep_alive", "ttl",
            "client_metadata", "stream_options", "incremental_output", "spaces_between_special_tokens",
            "max_tool_calls", "mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "dry_base",
            "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers")
# These have no effect at this value; at any other one, they would change the answer.
NEUTRAL = {"modalities": ["text"], "functions": [], "function_call": "auto", "suffix": "", "min_tokens": 0,
           "stop_token_ids": [], "bad_words": [], "include_stop_str_in_output": False,
           "skip_special_tokens": True, "add_generation_prompt": True, "use_beam_search": False, "length_penalty": 1,
           "typical_p": 1, "tfs_z": 1, "mirostat": 0, "xtc_probability": 0, "dry_multiplier": 0, "dynatemp_range": 0,
           "reasoning_format": "auto", "reasoning_in_content": False, "continue_final_message": False, "echo": False,
           "tools": [], "tool_choice": "auto", "top_logprobs": 0, "n_probs": 0, "min_keep": 0, "repeat_last_n": -1,
           "top_n_sigma": -1, "top_a": 0, "post_sampling_probs": False, "backend_sampling": False,
           "return_tokens": False, "return_token_ids": False, "return_tokens_as_token_ids": False,
           "enable_search": False, "raw_scores": False, "truncation_direction": "Right", "previous_response_id": None,
           "background": False, "include": [], "truncation": "disabled"}
ALSO_NEUTRAL = {"reasoning_format": "deepseek",  # the thought in reasoning_content, as here
                "include": ["reasoning.encrypted_content"]}  # thoughts to be sent back; a response has none here


def known(body: Body, names: tuple[str, ...]) -> Body:
    """The fields that aren't null. Raises Refusal for one that would have an effect elsewhere, and has none here."""
    for name, value in body.items():
        if name in names or name in IGNORED_FIELDS or value is None:
            continue
        if name not in NEUTRAL:
            raise Refusal(400, f"unknown field {brief(name)}{did_you_mean(name, names)}", brief(name), "unknown_field")
        if value not in (NEUTRAL[name], ALSO_NEUTRAL.get(name)):
            raise Refusal(400, f"{name} isn't supported", name, "unsupported_field")
    return {name: value for name, value in body.items() if value is not None and name in names}


def must_generate(model: Model) -> None:
    if model.embeds:
        raise Refusal(400, "this is an embedding model, which gives vectors: POST /v1/embeddings", "model")
    if model.source.kind.instead:
        raise Refusal(400, "this model speaks and doesn't chat: POST /v1/audio/speech", "model")


def flag(body: Body, name: str) -> bool:
    if not isinstance(value := body.get(name, False), bool):
        raise Refusal(400, f"{name} must be true or false, not {brief(repr(value), 80)}", name)
    return value


def object_in(body: Body, name: str) -> Body:
    """The object in a field; an empty one where there is none."""
    if not isinstance(value := body.get(name), dict | None):
        raise Refusal(400, f"{name} must be an object", name)
    return value or {}


def whole(body: Body, name: str, default: int, low: int, high: int) -> int:
    value = body.get(name, default)
    if not is_whole(value, low) or value > high:
        raise Refusal(400, f"{name} must be a whole number from {low} to {high}, not {brief(repr(value), 80)}", name)
    return value


def as_sent(error: InputError, names: Mapping[str, str]) -> Refusal:
    """The error, about the field that the client has sent. names: our name of a field -> the client's."""
    message = str(error)
    word = message.partition(" ")[0].rstrip(":")
    message = names.get(word, word) + message[len(word):]
    if isinstance(error, Refusal):
        return Refusal(error.status, message, names.get(error.param or "", error.param), error.code, error.headers)
    return Refusal(400, message, names.get(word), "context_length_exceeded" if isinstance(error, TooLong) else None)


def sent_names(body: Body) -> dict[str, str]:
    return {RENAMED.get(name, name): name for name in body}


def body_options(defaults: dict[str, Any], body: Body) -> AnswerOptions:
    """The options of a request, with `defaults` for absent ones. Raises Refusal."""
    given = {RENAMED.get(name, name): body[name] for name in (*OURS, *RENAMED) if name in body}
    for name, none in (("top_k", 0), ("seed", None), ("max_new_tokens", None)):
        if given.get(name) == -1:  # as vLLM, llama.cpp and LM Studio write it
            given[name] = none
    if isinstance(bias := given.get("logit_bias"), dict) and len(bias) > MOST_BIASES:
        raise Refusal(400, f"logit_bias has {len(bias):,} tokens; at most {MOST_BIASES:,} are taken", "logit_bias")
    if flag(body, "ignore_eos"):
        given["eos_token_ids"] = ()
    try:
        return options_of(defaults | given)
    except InputError as error:
        raise as_sent(error, sent_names(body)) from error
