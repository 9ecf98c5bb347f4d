"""qwen3_lib/app/records.py: rows become requests, answers become results, and wrong rows are refused in one line."""
import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import qwen3
from helpers import assert_one_line, message_of, patiently, works_or_refused
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.schema import regex
from qwen3_lib.app import records
from qwen3_lib.app.fields import CHAT
from qwen3_lib.app.records import JobSettings, answer_row, id_of, open_source, parsed_row, refused_row, result_of
from qwen3_lib.io.errors import InputError

BEES = "How do bees find home?"
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]


def request(*args):
    """(ids, options as a dict without those that are left out) of a record."""
    asked = records.request_of_row(*args)
    [(ids, options)] = asked.answers
    given = {name: value for name, value in vars(options).items() if value not in (None, ())}
    return ids, given | ({} if asked.tools is None else {"tools": asked.tools})


def chat_ids(model, messages, tools=None, think=None):
    return qwen3.chat(model, messages, tools, think, max_new_tokens=1).prompt_ids.tolist()


# ---- JSON lines ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("row", [{"prompt": BEES, "enable_thinking": False},
                                 {"prompt": BEES, "enable_thinking": True, "tools": TOOLS}])
def test_a_prompt_is_asked_as_chat_asks_it(demo, row):
    ids, options = request(demo, JobSettings(), row, 1)
    assert ids == chat_ids(demo, BEES, row.get("tools"), row.get("enable_thinking"))
    messages = [{"role": "user", "content": BEES}]
    rest = {key: value for key, value in row.items() if key != "prompt"}
    assert request(demo, JobSettings(), {"messages": messages} | rest, 1) == (ids, options)
    defaults = JobSettings(think=row.get("enable_thinking"), tools=row.get("tools"))
    assert request(demo, defaults, {"prompt": BEES}, 1) == (ids, options)
    kwargs = {"chat_template_kwargs": {"enable_thinking": row["enable_thinking"]}}
    assert request(demo, JobSettings(kwargs, tools=row.get("tools")), {"prompt": BEES}, 1)[0] == ids


def test_options_of_the_record_come_first(demo):
    settings = JobSettings({"temperature": 0.5, "max_new_tokens": 7, "seed": 10}, system="Be brief.")
    row = {"id": "a", "prompt": BEES, "temperature": 0.9, "top_k": 3, "min_p": None, "stop": ("x",), "logprobs": 2}
    ids, options = request(demo, settings, row, 5)
    assert ids == chat_ids(demo, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": BEES}])
    assert {name: options[name] for name in ("temperature", "top_k", "max_new_tokens", "stop", "logprobs")} == \
        {"temperature": 0.9, "top_k": 3, "max_new_tokens": 7, "stop": ("x",), "logprobs": 2}
    assert options["seed"] == 14 and request(demo, settings, row | {"seed": 3}, 5)[1]["seed"] == 3
    messages = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": BEES}]
    for own in (messages, messages[::-1]):  # the record's own system message may stand anywhere
        assert request(demo, settings, {"messages": own}, 1)[0] == chat_ids(demo, own)
    assert request(demo, JobSettings(raw=True), {"prompt": BEES}, 1) == (
        demo.tokenizer.encode(BEES), dataclasses.asdict(demo.sampling))  # resolved here, once


def test_a_record_has_the_fields_of_a_request_to_the_server(demo):
    fields = {"response_format": {"type": "regex", "pattern": "[0-9]+"}, "max_tokens": 3, "reasoning_effort": "none"}
    ids, options = request(demo, JobSettings(), {"prompt": BEES} | fields, 1)
    assert ids == chat_ids(demo, BEES, None, False) and options["max_new_tokens"] == 3
    assert Completion(demo, ids, **options).finish().text.isdecimal()
    ids, options = request(demo, JobSettings({"schema": regex("[0-9]+")}), {"prompt": BEES, "tools": TOOLS}, 1)
    assert ids == chat_ids(demo, BEES, TOOLS)  # the model is told the tools, but the job's grammar has no calls
    assert Completion(demo, ids, think_budget=0, max_new_tokens=9, **options).finish().answer.content.isdecimal()
    messages = [{"role": "user", "content": BEES}, {"role": "assistant", "content": "Bees are"}]
    assert demo.tokenizer.decode(request(demo, JobSettings(), {"messages": messages}, 1)[0]).endswith("Bees are")


def test_without_thinking_a_model_that_samples_gets_its_authors_other_settings(demo):
    model = dataclasses.replace(demo, sampling=qwen3.Sampling(50.0))
    for think, drawn in ((False, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}), (None, {"temperature": 50.0})):
        for row in ({"prompt": BEES}, batch_line()):
            assert request(model, JobSettings(think=think), row, 1)[1].items() >= drawn.items()
        asked = {"messages": BEES, "enable_thinking": think, "seed": 3, "max_tokens": 9}
        assert qwen3.chat(model, **asked).finish().token_ids == qwen3.chat(demo, **asked, **drawn).finish().token_ids


@pytest.mark.parametrize("row, words", [
    ({}, '"prompt" or "messages"'), ({"prompt": "a", "messages": []}, "not both"), ({"prompt": ""}, "prompt is empty"),
    ({"prompt": 5}, "must be a text"), ({"prompt": " \n"}, "empty"), ({"prompt": "a", "promt": 1}, "mean prompt?"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens must"),
    ({"prompt": "a", "max_new_token": 3}, "did you mean max_new_tokens?"), ({"prompt": "a", "cache": 1}, "field cache"),
    ({"messages": []}, "list of messages"), ({"messages": "a"}, "list of messages"), ({"messages": [5]}, "message 0"),
    ({"messages": [{"role": "king", "content": "a"}]}, "role"), ({"prompt": "a", "tools": [1]}, "tools must be"),
    ({"prompt": "a", "enable_thinking": 1}, "true or false"),
    ({"prompt": "\ud800"}, "lone surrogate"), ({"custom_id": "a"}, '"body" must be an object'),
    ({"messages": [{"role": "user", "content": "a"}], "raw": True}, "--raw")])
def test_records_that_are_refused(demo, row, words):
    assert_one_line(message_of(request, demo, JobSettings(raw=row.pop("raw", False)), row, 1), words)


@pytest.mark.parametrize("line, words", [(b'"a"', "found str"), (b"{", "not valid JSON"), (b"\xc3(", "byte 0 is 0xc3"),
                                         (b"1" * 5000, "not valid JSON"), (b"[" * 10**6, "not valid JSON")])
def test_lines_that_are_no_object(line, words):
    assert_one_line(message_of(parsed_row, line), words)


def test_ids():
    rows = ({}, {"id": None}, {"id": "a"}, {"id": 7}, {"id": 1.7e9}, {"custom_id": "c"}, {"id": "a", "custom_id": "c"})
    assert [id_of(row, 9) for row in rows] == [9, 9, "a", 7, 1.7e9, "c", "c"]
    for wrong in (float("nan"), -float("inf"), True, [], {}):
        assert_one_line(message_of(id_of, {"id": wrong}, 1), "the id must be")


VALUES = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(-3, 10**6), st.floats(), st.text(max_size=5)),
                      lambda inner: st.lists(inner, max_size=3)
                      | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6)
KEYS = st.sampled_from([*CHAT, "id", "prompt", "custom_id", "body", "url", "method", "role", "content", "n", "logprobs",
                        "top_logprobs", "max_tokens", "chat_template_kwargs", "response_format", "eos_token_ids"])
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": VALUES},
                                optional={"tool_calls": VALUES, "reasoning_content": VALUES})
ROWS = st.dictionaries(KEYS, VALUES | st.lists(MESSAGE, max_size=3) | st.dictionaries(KEYS, VALUES, max_size=4),
                       max_size=4)


@patiently(100)
@given(row=ROWS | ROWS.map(lambda row: row | {"prompt": "a"}) | ROWS.map(lambda row: {"custom_id": "a", "body": row}))
def test_any_object_is_answered_or_refused(talker, row):
    """A result is always a line that names its record."""
    def work():
        record_id = id_of(row, 1)
        ids, options = request(talker, JobSettings(), row, 1)
        completion = Completion(talker, ids, **options | {"max_new_tokens": 1}).finish()
        return answer_row(completion, 1, record_id, openai=True)

    result = works_or_refused(work) or refused_row(InputError("no"), 1, None, openai=True)
    assert result_of(json.dumps(result).encode() + b"\n")[0] == 1


# ---- OpenAI's batch files --------------------------------------------------------------------------------------------

def batch_line(**body):
    return {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "gpt-5", "messages": [{"role": "user", "content": BEES}]} | body}


def test_openai_requests(demo):
    ours = {"messages": [{"role": "user", "content": BEES}]}
    for body, same in [({}, {}), ({"max_completion_tokens": 5}, {"max_new_tokens": 5}),
                       ({"temperature": 0.5, "top_p": 0.5, "seed": 3, "stop": ["a"], "logit_bias": {"5": -100}}, ...),
                       ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}), ({"logprobs": True}, {"logprobs": 0}),
                       ({"tools": TOOLS, "tool_choice": "auto"}, {"tools": TOOLS}),
                       ({"tools": TOOLS, "tool_choice": "none"}, {}),
                       ({"reasoning_effort": "none"}, {"enable_thinking": False}),
                       ({"reasoning_effort": "low"}, {"enable_thinking": True, "think_budget": 256}),
                       ({"modalities": ["text"], "stream_options": {"include_usage": True}, "store": True, "n": 1,
                         "stream": False, "logprobs": False, "metadata": {"a": "b"}, "parallel_tool_calls": True}, {}),
                       ({"chat_template_kwargs": {"enable_thinking": False, "reasoning": "x"}, "top_k": 5},
                        {"enable_thinking": False, "chat_template_kwargs": {"reasoning": "x"}, "top_k": 5})]:
        assert request(demo, JobSettings(), batch_line(**body), 1) == \
            request(demo, JobSettings(), ours | (body if same is ... else same), 1)
    for think in (True, False):  # without a budget, which a reasoning_effort may have
        assert request(demo, JobSettings(think=think), batch_line(), 1) == \
            request(demo, JobSettings(), ours | {"enable_thinking": think}, 1)
    developer, system = ([{"role": role, "content": "Rhyme."}, *ours["messages"]] for role in ("developer", "system"))
    job = JobSettings(system="Be brief.", tools=TOOLS)
    assert request(demo, job, batch_line(messages=developer, tool_choice="none"), 1) == \
        request(demo, JobSettings(), {"messages": system}, 1)


@pytest.mark.parametrize("change, words", [
    ({"url": "/v1/embeddings"}, "/v1/embeddings"), ({"method": "GET"}, "GET"), ({"body": []}, "object"),
    ({"id": 5}, "id"), ({"body": {"n": 2}}, "n must be 1"), ({"body": {"stream": True}}, "stream false"),
    ({"body": {"parallel_tool_calls": False}}, "parallel_tool_calls true"), ({"body": {"logprobs": 5}}, "logprobs"),
    ({"body": {"tool_choice": {"type": "function", "function": {"name": "look"}}}}, "tool_choice"),
    ({"body": {"reasoning_effort": "lots"}}, "reasoning_effort must be"),
    ({"body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}}, "can't see"),
    ({"body": {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"effort": 1}}},
     "chat_template_kwargs must be"), ({"body": {"temprature": 1}}, "did you mean temperature?")])
def test_openai_requests_that_are_refused(demo, change, words):
    line = batch_line()
    line |= {key: line["body"] | value if key == "body" and value else value for key, value in change.items()}
    assert_one_line(message_of(request, demo, JobSettings(), line, 1), words)


def test_openai_requests_for_a_form(demo):
    """Fields that need llguidance. An option of the line replaces the same option of the job."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    job = JobSettings({"schema": {"type": "array"}, "temperature": 0.5, "seed": 3}, think=True)
    for body, wanted in [({"response_format": form}, '{"a": {"type": "string"'), ({}, '"type": "array"'),
                         ({"response_format": {"type": "text"}}, None),
                         ({"response_format": {"type": "json_object"}}, '"type": "object"'),
                         ({"response_format": form | {"json_schema": {"name": "x"}}}, '"type": "object"')]:
        ids, options = request(demo, job, batch_line(temperature=0.7, **body), 5)
        assert wanted in options["schema"].text if wanted else "schema" not in options
        assert (options["temperature"], options["seed"]) == (0.7, 7)
        assert ids == chat_ids(demo, BEES, think=True)
    ids, options = request(demo, JobSettings(), batch_line(tools=TOOLS, tool_choice="required", seed=1), 1)
    completion = Completion(demo, ids, **options | {"max_new_tokens": 100, "temperature": 0}).finish()
    assert [call["name"] for call in completion.answer.tool_calls] == ["look"]


def test_openai_answers(demo):
    completion = qwen3.chat(demo, BEES, max_new_tokens=5, logprobs=2).finish()
    result = answer_row(completion, 3, "r-1", openai=True)
    assert result["custom_id"] == "r-1" and result["error"] is None and result["response"]["status_code"] == 200
    body = result["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "demo"
    [choice] = body["choices"]
    assert choice["message"].get("reasoning_content") == completion.answer.reasoning
    assert (choice["message"]["content"], choice["finish_reason"]) == (completion.answer.content, "length")
    assert body["usage"]["total_tokens"] == len(completion.prompt_ids) + 5
    for entry, logprob in zip(choice["logprobs"]["content"], completion.logprobs, strict=True):
        assert abs(entry["logprob"] - logprob.logprob) < 1e-5 and len(entry["top_logprobs"]) == 2
    with pytest.raises(InputError) as caught:
        request(demo, JobSettings(), batch_line(temprature=1), 3)
    wrong = refused_row(caught.value, 3, "r-1", openai=True)
    error = wrong["response"]["body"]["error"]
    assert (wrong["response"]["status_code"], error["param"], error["code"]) == (400, "temprature", "unknown_field")
    assert [result_of(json.dumps(each).encode() + b"\n") for each in (result, wrong)] == [(3, True), (3, False)]


def test_a_result_says_nothing_that_depends_on_what_else_runs(demo):
    asked = {"messages": BEES, "max_new_tokens": 3, "temperature": 0, "cache": demo.engine.new_cache(demo.config)}
    one, other = (answer_row(qwen3.chat(demo, **asked).finish(), 3, "a", False) for _ in range(2))
    assert one == other  # the second one found its prompt in the cache


# ---- Files -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, data, form", [
    ("a.txt", b'\xef\xbb\xbf\n {"prompt": "a"}\n', "json"), ("a.txt", b"[1]\n{}\n", "text"), ("a", b"Hello", "text"),
    ("a.jsonl", b"Hello\n", "json"), ("a.JSON", b"[\n", "json"), ("a", b" \n", "json")])
def test_forms_of_files(tmp_path, name, data, form):
    (tmp_path / name).write_bytes(data)
    assert open_source(str(tmp_path / name)).form == form
    assert open_source(str(tmp_path / name), text=True).form == "text"


def test_plain_text(tmp_path):
    (tmp_path / "in.txt").write_bytes("\ufeffHello!\r\n\n  \n\ufeff{蜜} \n".encode() + b"\xff\nlast")
    source = open_source(str(tmp_path / "in.txt"))
    assert (source.n_records, source.last) == (4, 6)
    rows = dict(source.rows())
    assert {line: parsed_row(rows[line], "text")["prompt"] for line in (1, 4, 6)} == {1: "Hello!", 4: "{蜜}", 6: "last"}
    assert_one_line(message_of(parsed_row, rows[5], "text"), "not UTF-8 text: byte 0 is 0xff")


def test_what_is_told_of_a_table_makes_json_lines(tmp_path):
    """The command in the message, for CSV as Excel writes it; for Parquet that of pandas."""
    table = [{"id": "007", "TEXT": 'Bees, "and"\nhoney'}, {"id": "1", "TEXT": "蜜蜂"}]
    with open(tmp_path / "in.CSV", "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, ["id", "TEXT"])
        writer.writeheader()
        writer.writerows(table)
    command = message_of(open_source, str(tmp_path / "in.CSV")).partition("JSON lines of it: ")[2]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, cwd=tmp_path, env=os.environ | {"PATH": path})
    assert [parsed_row(line) for _, line in open_source(str(tmp_path / "in.jsonl")).rows()] == [
        {"prompt": row["TEXT"]} for row in table]
    (tmp_path / "in.parquet").write_bytes(b"PAR1")
    assert_one_line(message_of(open_source, str(tmp_path / "in.parquet")), "pandas.read_parquet")


@pytest.mark.parametrize("name, words", [("-", "-: not a regular file"), (".", "not a regular file"),
                                         ("nowhere.jsonl", "nowhere.jsonl: cannot be read: No such file"),
                                         ("/dev/null", "not a regular file")])
def test_inputs_that_cannot_be(name, words):
    assert_one_line(message_of(open_source, name), words)


@pytest.mark.parametrize("line", [b"", b"{}\n", b'{"line": 1}', b'{"line": 0}\n', b'{"line": true}\n',
                                  b'{"line": "1"}\n', b'{"id": "batch_req_"}\n', b'{"id": "batch_req_0"}\n', b"[1]\n",
                                  b"\0\n", b"[" * 10**5, b'{"line": 1} {"line": 2}\n', b'{"id": 3}\n'])
def test_lines_that_are_no_result(line):
    assert result_of(line) is None
