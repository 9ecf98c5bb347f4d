"""OpenAI's form at the functions of qwen3_lib/app/openai.py: what a request asks for, what an answer becomes."""
import json
from types import SimpleNamespace

import pytest

from helpers import PERU, message_of
from qwen3_lib.app.openai import Door, chat_request, text_request
from qwen3_lib.app.fields import Refusal
from qwen3_lib.app.objects import call_object, chat_choice
from qwen3_lib.generation.completion import Completion
from tokenizer_utils import parse_answer

ASKED = [{"role": "user", "content": PERU}]
CALLS = "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>' for name in "fg")


def asked(model, /, **fields):
    """(the text of a request's prompt, its options)"""
    [(prompt, options)] = chat_request(model, {"messages": ASKED} | fields, Door(1000)).answers
    return model.tokenizer.decode(prompt), options


@pytest.mark.parametrize("effort, think, budget", [
    ("none", False, None), ("minimal", False, None), ("low", True, 256), ("medium", True, 1024), ("high", True, None),
    ("xhigh", True, None), ("max", True, None)])
def test_reasoning_effort(demo, effort, think, budget):
    text, options = asked(demo, reasoning_effort=effort)
    assert text == demo.tokenizer.apply_chat_template(ASKED, enable_thinking=think) and options.think_budget == budget


@pytest.mark.parametrize("fields, think", [
    ({}, None), ({"enable_thinking": False}, False), ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ({"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True}, True),
    ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, False),
    ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False)], ids=str)
def test_a_requests_own_field_wins_over_those_of_the_template(demo, fields, think):
    assert asked(demo, **fields)[0] == demo.tokenizer.apply_chat_template(ASKED, enable_thinking=think)


@pytest.mark.parametrize("field, option, value", [
    ("top_k", "top_k", 0), ("seed", "seed", None), ("max_tokens", "max_new_tokens", None),
    ("n_predict", "max_new_tokens", None), ("max_completion_tokens", "max_new_tokens", None)])
def test_minus_one_is_no_limit_and_no_seed(demo, field, option, value):
    """As vLLM, llama.cpp and LM Studio write it; -2 is refused under the name that was sent."""
    assert getattr(asked(demo, **{field: -1})[1], option) == value
    assert getattr(asked(demo, **{field: 3})[1], option) == 3
    with pytest.raises(Refusal, match=f"^{field} ") as refused:
        asked(demo, **{field: -2})
    assert refused.value.param == field


def test_options_of_the_door_are_those_of_absent_fields(demo):
    """All settings of sampling are given then; no body changes what only a door may say."""
    door = Door(1000, options={"draft": "off", "max_pixels": 5000, "temperature": 0.5, "top_k": 7})
    for make, body in ((chat_request, {"messages": ASKED}), (text_request, {"prompt": "a"})):
        [(_, options)] = make(demo, body | {"top_k": 9}, door).answers
        assert (options.draft, options.max_pixels) == ("off", 5000)
        assert options.sampling == demo.sampling.updated(temperature=0.5, top_k=9)
        for field in ("draft", "max_pixels"):
            assert "unknown field" in message_of(make, demo, body | {field: 1}, door)


def test_how_many_of_a_thing_a_request_may_ask_for(demo):
    """Choices, logprobs, prompts: the most, and one more."""
    door, more = Door(1000), {"messages": ASKED, "logprobs": True}
    assert chat_request(demo, more | {"top_logprobs": 20}, door).answers[0][1].logprobs == 20
    assert len(chat_request(demo, {"messages": ASKED, "n": 8}, door).answers) == 8
    assert len(text_request(demo, {"prompt": ["a"] * 128}, door).answers) == 128
    assert text_request(demo, {"prompt": "a", "logprobs": 20}, door).answers[0][1].logprobs == 20
    for make, body, field in ((chat_request, more | {"top_logprobs": 21}, "top_logprobs"),
                              (chat_request, {"messages": ASKED, "n": 9}, "n"),
                              (text_request, {"prompt": ["a"] * 129}, "prompt"),
                              (text_request, {"prompt": []}, "prompt"),
                              (text_request, {"prompt": "a", "logprobs": 21}, "logprobs")):
        with pytest.raises(Refusal) as refused:
            make(demo, body, door)
        assert (refused.value.status, refused.value.param) == (400, field)


# What vLLM, llama.cpp and clients send by default, and it changes nothing.
DEFAULTS = {"modalities": ["text"], "functions": [], "function_call": "auto", "suffix": "", "min_tokens": 0,
            "stop_token_ids": [], "bad_words": [], "include_stop_str_in_output": False, "skip_special_tokens": True,
            "use_beam_search": False, "length_penalty": 1, "typical_p": 1.0, "tfs_z": 1, "mirostat": 0,
            "xtc_probability": 0.0, "dry_multiplier": 0, "dynatemp_range": 0, "reasoning_in_content": False,
            "n_probs": 0, "min_keep": 0, "repeat_last_n": -1, "top_n_sigma": -1, "top_a": 0, "raw_scores": False,
            "post_sampling_probs": False, "backend_sampling": False, "return_tokens": False, "background": False,
            "return_token_ids": False, "return_tokens_as_token_ids": False, "enable_search": False,
            "truncation_direction": "Right", "previous_response_id": None, "truncation": "disabled", "echo": False,
            "best_of": None}


def test_fields_that_change_nothing_at_their_defaults(demo):
    assert asked(demo, **DEFAULTS | {"seed": 3}) == asked(demo, seed=3)
    for form in ("auto", "deepseek"):
        asked(demo, reasoning_format=form)
    for name in DEFAULTS:
        with pytest.raises(Refusal) as refused:
            asked(demo, **{name: [7]})
        assert refused.value.param == name
    [(prompt, _)] = text_request(demo, DEFAULTS | {"prompt": "a", "tools": [], "tool_choice": "auto"}, Door(9)).answers
    assert prompt == demo.tokenizer.encode("a")


# Clients of OpenAI, vLLM, llama.cpp, Open WebUI and LM Studio send these with any value.
ABOUT_THE_CLIENT = """model user metadata store service_tier safety_identifier prompt_cache_key verbosity id id_slot ttl
chat_id prompt_cache_retention prediction cache_prompt include_reasoning timings_per_token return_progress
session_id request_id priority keep_alive client_metadata spaces_between_special_tokens incremental_output
max_tool_calls mirostat_tau mirostat_eta xtc_threshold dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n
dry_sequence_breakers"""


def test_fields_that_never_change_an_answer(demo):
    assert asked(demo, **dict.fromkeys(ABOUT_THE_CLIENT.split(), [7])) == asked(demo)
    with pytest.raises(Refusal, match="unknown field metadatum"):
        asked(demo, metadatum=5)


@pytest.mark.parametrize("fields, param", [({"best_of": 2}, "best_of"), ({"best_of": 1, "n": 2}, "best_of"),
                                           ({"echo": True, "logprobs": 0}, "echo"), ({"best_of": 2, "n": 2}, None),
                                           ({"echo": True}, None), ({"logprobs": 0}, None)], ids=str)
def test_what_a_completion_refuses(demo, fields, param):
    if param is None:
        assert text_request(demo, {"prompt": "a"} | fields, Door(9)).n == fields.get("n", 1)
    else:
        with pytest.raises(Refusal) as refused:
            text_request(demo, {"prompt": "a"} | fields, Door(9))
        assert refused.value.param == param


def test_the_id_of_a_call():
    """A name that is given, or one of its own."""
    call = {"name": "f", "arguments": "{}"}
    assert call_object(call, "call_1")["id"] == "call_1" and call_object(call)["function"] == call
    assert len({call_object(call)["id"] for _ in range(99)}) == 99


def test_answers_that_go_on_behind_their_end(demo):
    same = {"enable_thinking": False, "temperature": 0, "max_tokens": 30}
    for ignored in (False, True):
        answered = chat_request(demo, {"messages": ASKED} | same | {"ignore_eos": ignored}, Door(1000)).answers[0]
        found = Completion(demo, answered[0], options=answered[1]).finish()
        assert (len(found.token_ids), found.finish_reason) == (30, "length") if ignored else (
            len(found.token_ids) < 30 and found.finish_reason == "stop")


@pytest.mark.parametrize("text, one_call, content, names, reason", [
    ("Hi.", False, "Hi.", None, "stop"), ("", False, "", None, "stop"), (CALLS, False, None, "fg", "tool_calls"),
    (CALLS, True, None, "f", "tool_calls"), (f"Hm. {CALLS}", True, "Hm.", "f", "tool_calls"),
    ("<think>\nhm\n</think>\n\n", False, "", None, "stop"),
    ("<think>\nhm\n</think>\n\nHi.", False, "Hi.", None, "stop")])
def test_the_message_of_an_answer(text, one_call, content, names, reason):
    """Its text is null beside calls alone, and never absent."""
    completion = SimpleNamespace(answer=parse_answer(text), options=SimpleNamespace(logprobs=None), ended="stop")
    choice = chat_choice(completion, one_call)
    message = choice["message"]
    assert (message["role"], message["content"], choice["finish_reason"], choice["logprobs"]) == (
        "assistant", content, reason, None)
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert calls == [{"name": name, "arguments": json.dumps({"a": 1})} for name in names or ""]
    assert {*message} == {"role", "content", *["tool_calls"] * bool(names), *["reasoning_content"] * ("hm" in text)}
