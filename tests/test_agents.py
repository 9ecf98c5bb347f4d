"""Coding agents that others wrote, unmodified, against the server: they carry out what a scripted model says.

They come by npm, into the folder that QWEN3_AGENTS names: see CONTRIBUTING.md.
"""
import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import qwen3
from configs import ROOT, TINY, VOCABULARY
from fuzzing import DEMO
from helpers import with_engine
from make_random_model import make_random_model
from serving import Served

PROGRAMS = Path(os.environ.get("QWEN3_AGENTS", "no folder")) / "node_modules/.bin"
CONTEXT = 131_072  # tokens; an agent's first prompt has 12,000 to 36,000 of the bundled tokenizer's
TASK, ANSWER = "Write the word Hello into the file hello.txt.", "The file is there now."


def scripted(path, answer_to):
    """A model of this folder that computes nothing: its answer to a prompt is always answer_to(text of the prompt)."""
    model = qwen3.load_model(path)
    tokenizer = model.tokenizer
    begin, end = (tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    heads = [tokenizer.encode(f"<|im_start|>assistant\n{thought}") for thought in ("<think>\n\n</think>\n\n", "")]

    @cache
    def answer(prompt):
        return [*tokenizer.encode(answer_to(tokenizer.decode(np.frombuffer(prompt, np.int64)))), end]

    def next_token(ids):
        start = int(np.flatnonzero(ids == begin)[-1])
        head = next((head for head in heads if ids[start:start + len(head)].tolist() == head), None)
        if head is None:  # these tokens are a part of a prompt, whose logits nobody reads
            return end
        tokens, n = answer(ids[:start].astype(np.int64).tobytes()), len(ids) - start - len(head)
        return tokens[min(n, len(tokens) - 1)]

    def run(model, new):
        new.advance()
        tokens = [next_token(part.token_ids[:part.length + row + 1 - rows.stop])
                  for part, rows in new.parts for row in new.wanted if rows.start <= row < rows.stop]
        logits = np.zeros((len(tokens), model.config.vocab_size), np.float32)
        logits[range(len(tokens)), tokens] = 100
        return logits, new.x

    return with_engine(model, run=run)


def pasted(heading, url, home):
    """What docs/agents.md says: variables of the shell, and a file in the home."""
    part = (ROOT / "docs/agents.md").read_text("utf-8").partition(f"\n## {heading}\n")[2]
    file, kind, lines = re.match(r"\n(?:`~/(.*?)`:\n\n)?```(\w+)\n(.*?)```\n", part, re.DOTALL).groups()
    lines = lines.replace("http://127.0.0.1:8080", url).replace('"context": 32768', f'"context": {CONTEXT}')
    if file is None:
        return dict(re.findall(r"([A-Z_]+)=(\S+)", lines))
    (home / file).parent.mkdir(parents=True)
    (home / file).write_text(lines)
    return {}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("heading, command, call", [
    ("Claude Code", ["claude", "--allowedTools", "Write", "-p"],
     {"name": "Write", "arguments": {"file_path": "{file}", "content": "Hello\n"}}),
    ("Codex", ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
     {"name": "exec_command", "arguments": {"cmd": "echo Hello > '{file}'"}}),
    ("Qwen Code", ["qwen", "--yolo", "--auth-type", "openai"],
     {"name": "write_file", "arguments": {"file_path": "{file}", "content": "Hello\n"}}),
    ("opencode", ["opencode", "run"], {"name": "write", "arguments": {"filePath": "{file}", "content": "Hello\n"}})])
def test_an_agent_carries_out_what_the_model_says(tmp_path, heading, command, call):
    """And its second request finds the first one and the answer to it in the cache."""
    program = PROGRAMS / command[0]
    if not program.exists():
        pytest.skip("QWEN3_AGENTS names no folder with the agents, which npm installs")
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir(), home.mkdir()
    written = json.dumps(call).replace("{file}", str(work / "hello.txt"))

    def answer_to(prompt):
        if "<tools>" not in prompt:  # a request beside the conversation, such as for its title
            return "Hello"
        if "<tool_response>" in prompt.rpartition("<|im_start|>user")[2]:
            return f"<think>\nIt worked.\n</think>\n\n{ANSWER}"
        return f"<think>\nA file is wanted.\n</think>\n\nI write it.\n<tool_call>\n{written}\n</tool_call>"

    path = make_random_model(TINY | {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}, tmp_path / "model",
                             "float32", tokenizer=DEMO)
    with Served(scripted(path, answer_to), slots=2, longest=CONTEXT, seconds=300) as served:
        asked, add = [], served.worker.batch.add
        served.worker.batch.add = lambda *args, **options: asked.append(add(*args, **options)) or asked[-1]
        nowhere = "http://127.0.0.1:9"  # so that nothing but this machine is asked
        env = {"PATH": os.environ["PATH"], "HOME": str(home)} | pasted(heading, served.url, home)
        if heading != "Qwen Code":  # which doesn't read NO_PROXY
            env |= {"HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere, "NO_PROXY": "127.0.0.1"}
        done = subprocess.run([program, *command[1:], TASK], cwd=work, env=env, stdin=subprocess.DEVNULL, text=True,
                              capture_output=True, timeout=300)
        assert done.returncode == 0 and ANSWER in done.stdout, (done, asked)
        assert (work / "hello.txt").read_text() == "Hello\n"
        first, second = [each for each in asked if "<tools>" in each.model.tokenizer.decode(each.prompt_ids)]
        assert len(first.prompt_ids) > 5000 and not first.cached_tokens > 100
        assert second.cached_tokens >= len(first.prompt_ids) + len(first.token_ids) - 1
