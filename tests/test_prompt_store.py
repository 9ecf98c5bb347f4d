"""qwen3_lib/generation/prompt_store.py: prompts on the disk give the answers that computing gives, whatever happens."""
import argparse
import gc
import json
import os
import random
import signal
import stat
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3
import qwen3_numba
from configs import BASE, FLASH, FRANCE, HYBRID, HYBRID_MOE, ROOT, VOCABULARY
from helpers import (assert_cli_refuses, assert_one_line, edit_json, forked, message_of, patiently, random_ids,
                     run_main, with_engine)
from make_random_model import make_random_model
from qwen3_lib.app.arguments import checked_size, prompt_store as prompt_store_of
from qwen3_lib.generation.batch import Batch
from qwen3_lib.generation import prompt_store
from qwen3_lib.generation.messages import prompt_of
from qwen3_lib.generation.prompt_store import BLOCK, PromptStore
from qwen3_lib.io import writing
from serving import Served
from test_qwen3_moe import MOE

END = 7  # the end of a turn
LONG = {"max_position_embeddings": 2048, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
SHAPES = {"dense": BASE | LONG, "mixture": MOE | LONG, "hybrid": HYBRID | {"vocab_size": VOCABULARY},
          "attending hybrid": HYBRID | {"vocab_size": VOCABULARY, "layer_types": ["full_attention"] * 4},
          "sparse hybrid": HYBRID_MOE | {"vocab_size": VOCABULARY}, "streams": FLASH | LONG | {"num_hidden_layers": 4}}
ENGINES = {"NumPy": None, "bf16": {}, "int8": {"quantize": "int8", "kv_dtype": "int8"}, "f16": {"kv_dtype": "f16"},
           "f32": {"kv_dtype": "f32", "activations": "f32"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, config in SHAPES.items():
        made[name] = make_random_model(config, tmp_path_factory.mktemp("model") / name.replace(" ", "_"), "bfloat16")
        (made[name] / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    return made


@pytest.fixture(scope="module")
def load(folders):
    """The model of a shape in an engine, loaded once."""
    made = {}

    def load(shape="dense", engine="bf16", threads=2):
        if (key := (shape, engine, threads)) not in made:
            options = ENGINES[engine]
            made[key] = qwen3.load_model(folders[shape]) if options is None else qwen3_numba.load_model(
                folders[shape], threads=threads, **options)
        return made[key]

    return load


def asked(batch, prompt, n=8, **options):
    answer = batch.add(object(), prompt, max_new_tokens=n, eos_token_ids=(), logprobs=1, seed=1, **options)
    while not batch.idle:
        batch.step()
    return answer


def told(answer):
    """All that must be the same; NumPy's sums depend on which tokens are computed together."""
    exact = not isinstance(answer.model.weights, dict)
    return answer.token_ids, answer.logprobs if exact else [entry.token_id for entry in answer.logprobs]


def on_disk(model, folder, budget=10**9, slots=2, kept=0):
    return Batch(model, slots, 1500, kept, PromptStore(model, folder, budget))


def words(n, seed=0):
    """Random ids, without an end of a turn."""
    return [token if token != END else 8 for token in random_ids(n, seed)]


def talk(n, seed=1):
    """A prompt of turns, the last of which a client's template has begun for the answer."""
    return words(n - 40, seed) + [END] + words(36, seed + 1) + [END, 5, 6]


CASES = [("dense", engine) for engine in ENGINES] + [("mixture", "NumPy"), ("mixture", "int8")] + [
    (shape, engine) for shape in ("hybrid", "sparse hybrid") for engine in ("NumPy", "bf16", "int8")] + [
    ("attending hybrid", "NumPy"), ("attending hybrid", "bf16")] + [
    ("streams", engine) for engine in ("NumPy", "bf16", "int8")]


@pytest.mark.core
@pytest.mark.parametrize("shape, engine", CASES)
def test_a_conversation_goes_on_after_a_restart(load, tmp_path, shape, engine):
    """From the end of the answer, or from the end of the question if the client renders the answer in another way."""
    model, prompt = load(shape, engine), talk(700)
    first = on_disk(model, tmp_path / "kept")
    plain, answer = asked(Batch(model, 1, 1500), prompt), asked(first, prompt)
    first.save()
    assert told(answer) == told(plain) and answer.cached_tokens == 0
    whole, turn = len(prompt) + 7, len(prompt) - 2
    for then, found in ((prompt, turn), ([*prompt, *answer.token_ids, END, *words(30, 3)], whole),
                        (prompt[:turn] + words(30, 4), turn), (prompt[:600] + words(200, 5), 512)):
        found = 0 if found == 512 and shape in ("hybrid", "sparse hybrid", "streams") else found
        again = asked(on_disk(load(shape, engine, 1), tmp_path / "kept", slots=3), then)
        assert (told(again), again.cached_tokens) == (told(asked(Batch(model, 1, 1500), then)), found)


def test_what_is_in_memory_is_not_read_again(load, tmp_path, monkeypatch):
    """Nor written again, nor touched."""
    model, read, prompt = load(), [], talk(900)
    batch, real = on_disk(model, tmp_path), PromptStore.read
    monkeypatch.setattr(PromptStore, "read", lambda self, name: read.append(name) or real(self, name))
    asked(batch, prompt[:300])
    batch.save()
    before = {entry.name: entry.stat().st_ino for entry in tmp_path.iterdir()}
    asked(batch, prompt)
    batch.save()
    assert not read and before.items() <= {entry.name: entry.stat().st_ino for entry in tmp_path.iterdir()}.items()
    other = on_disk(model, tmp_path)
    asked(other, prompt[:520])
    assert len(read) == 2  # two whole blocks: what follows was asked for by nobody
    assert asked(other, prompt).cached_tokens == 898 and len(read) == 4  # the third, and the end of the turn


def test_the_state_of_a_file_is_kept_in_memory(load, tmp_path, monkeypatch):
    """For another answer to the same question, too, it is read once."""
    model, prompt, read, real = load("hybrid"), talk(700), [], PromptStore.read
    first = on_disk(model, tmp_path)
    asked(first, prompt)
    first.save()
    monkeypatch.setattr(PromptStore, "read", lambda self, name: read.append(name) or real(self, name))
    batch = on_disk(model, tmp_path, slots=1)
    assert [asked(batch, [*prompt, i]).cached_tokens for i in (5, 6)] == [698, 698]
    assert len([name for name in read if name.endswith("state")]) == 1


def test_a_prompt_that_leaves_the_memory_is_found_on_the_disk(load, tmp_path):
    """From a slot if there is no other memory, or from a copy that goes; the side requests of agents don't matter."""
    model, prompts = load(), [talk(600, seed) for seed in (1, 11, 21)]
    for kept, folder in ((0, "none"), (2**19, "some")):
        batch = on_disk(model, tmp_path / folder, slots=1, kept=kept)
        expected = [told(asked(batch, prompt)) for prompt in prompts]
        again = [asked(batch, [*prompt, 9]) for prompt in prompts]
        assert [answer.cached_tokens for answer in again] == [598] * 3  # to the end of the question
        assert expected == [told(asked(Batch(model, 1, 1500), prompt)) for prompt in prompts]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1200), st.integers(0, 3), st.sampled_from(["", "", "a"]),
                          st.booleans()), min_size=1, max_size=8), st.sampled_from([0, 3 * 2**17, 2**20, 10**9]),
       st.sampled_from([0, 2**19]), st.sampled_from(["dense", "hybrid"]))
@patiently(15)
def test_any_requests_with_any_memory(load, scratch, wanted, budget, kept, shape):
    """Restarts in between, budgets that hold some or no files, salts."""
    model = load(shape, "int8")
    folder = Path(tempfile.mkdtemp(dir=scratch))
    batch = on_disk(model, folder, budget, 1, kept)
    for start, n, turn, salt, restart in wanted:
        prompt = talk(1300, start)[:max(n, 60)] + [END, turn]
        assert told(asked(batch, prompt, 2, salt=salt)) == told(asked(Batch(model, 1, 1500), prompt, 2))
        if restart:
            batch.save()
            batch = on_disk(model, folder, budget, 2, kept)
        assert sum(file.stat().st_size for file in folder.iterdir()) <= budget


# ---- Whose they are --------------------------------------------------------------------------------------------------

def test_another_model_engine_format_or_salt_finds_nothing(load, tmp_path, folders):
    ids = talk(300)
    models = {engine: load("dense", engine) for engine in ENGINES} | {
        "weights": qwen3_numba.load_model(folders["dense"], "int8", 2),
        "exact": qwen3_numba.load_model(folders["dense"], "int8", 2, "f16", activations="f32"),
        "rounded bf16": qwen3_numba.load_model(folders["dense"], "int8", 2, "bf16", activations="f32")}
    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    for name, change in (("rope", {"rope_theta": 10000}), ("YaRN", yarn)):
        path = make_random_model(SHAPES["dense"], tmp_path / name, "bfloat16")
        edit_json(path / "config.json", change)
        models[name] = qwen3.load_model(path)
    for name, model in models.items():
        store, cache = PromptStore(model, tmp_path / "kept", 10**9), model.engine.new_cache(model.config)
        assert store.find(np.array(ids)) == (0, []), name
        qwen3.forward(model, ids, cache)
        store.save(cache, "salt")
        store.save(cache)
        assert store.find(np.array(ids), "salt")[0] == store.find(np.array(ids))[0] == 300
        assert store.find(np.array(ids), "other") == (0, [])


def test_files_are_their_users_alone(load, tmp_path):
    batch = on_disk(load("hybrid"), tmp_path / "a" / "kept")
    asked(batch, talk(300))
    batch.save()
    files = [*(tmp_path / "a/kept").iterdir()]
    assert {file.suffix for file in files} == {".rows", ".state"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE((tmp_path / "a/kept").stat().st_mode) == 0o700
    (tmp_path / "file").write_text("")
    assert "file" in message_of(PromptStore, load(), tmp_path / "file", 1)
    assert "null" in message_of(PromptStore, load(), "a\0b", 1)


def test_pictures_are_known_by_what_they_show(tmp_path):
    """In another process, where they have other numbers; and no prompt ends with one that is gone."""
    def cached_tokens(folder, colour, text="what is this and where may it be found", **more):
        model = qwen3.load_model(ROOT / "tests/tiny_seeing")
        batch = Batch(model, 1, 500, 0, PromptStore(model, folder, 10**8))
        image = {"type": "image", "image": np.full((64, 64, 3), colour, np.uint8)}
        ids, _, pictures = prompt_of(model, [{"role": "user", "content": [image, {"type": "text", "text": text}]}])
        answer = asked(batch, ids)
        if more:
            del pictures, answer
            batch.slots[0].ahead = None
            model.media.recent.clear()
            gc.collect()
            batch.running.clear()
            n = len(batch.store.known(batch.slots[0].token_ids[:batch.slots[0].length]))
            batch.save()
            return n
        batch.save()
        return answer.cached_tokens, told(answer)

    (none, first), (n, again) = cached_tokens(tmp_path / "a", 200), cached_tokens(tmp_path / "a", 200)
    assert none == 0 < n and again == first
    assert cached_tokens(tmp_path / "a", 100)[0] < n  # nothing of the picture
    before = cached_tokens(tmp_path / "b", 200, gone=True)
    assert 0 < before < n and cached_tokens(tmp_path / "b", 200)[0] <= before


# ---- What may go wrong -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("shape", ["dense", "hybrid"])
def test_damaged_files_are_left_out_by_one_line(load, tmp_path, capfd, shape):
    """Cut, with a changed bit, with zeros in place of data or a header that lies: the answer is the same."""
    model, prompt, rng = load(shape), talk(800), random.Random(1)
    batch = on_disk(model, tmp_path)
    expected = told(asked(batch, prompt))
    batch.save()
    sound = {file: file.read_bytes() for file in tmp_path.iterdir()}
    used = {tmp_path / name for name in PromptStore(model, tmp_path, 10**9).find(np.array(prompt[:-1]))[1]}
    capfd.readouterr()
    for file, data in sound.items():
        begin = 8 + int.from_bytes(data[:8], "little")
        place = rng.randrange(len(data))
        for wrong in (b"", data[:7], data[:begin], data[:-1], data + b"x", bytes(len(data)), data[:begin] + bytes(4096),
                      data[:place] + bytes([data[place] ^ 16]) + data[place + 1:],
                      b"\xff" * 8 + data[8:], data[:begin].replace(b'"k"', b'"v"') + data[begin:],
                      data[:8] + b"[]".ljust(begin - 8) + data[begin:],
                      data[:begin].replace(b"256", b"652") + data[begin:]):
            if wrong == data:
                continue
            file.write_bytes(wrong)
            assert told(asked(on_disk(model, tmp_path), prompt)) == expected
            said = capfd.readouterr().err
            if file in used:
                assert_one_line(said, file.name, "damaged")
                assert not file.exists()
            file.write_bytes(data)
    assert asked(on_disk(model, tmp_path), prompt).cached_tokens == 798


def test_files_that_are_damaged_together_are_written_anew_together(load, tmp_path, capfd):
    """As after a power cut: once they are computed again, all are found again."""
    model, prompt = load(), talk(800)
    batch = on_disk(model, tmp_path)
    expected = told(asked(batch, prompt))
    batch.save()
    for file in tmp_path.iterdir():
        file.write_bytes(b"")
    again = on_disk(model, tmp_path)
    assert told(asked(again, prompt)) == expected
    again.save()
    capfd.readouterr()
    assert asked(on_disk(model, tmp_path), prompt).cached_tokens == 798 and not capfd.readouterr().err


def test_files_that_go_while_they_are_used(load, tmp_path, capfd, monkeypatch):
    """Another process may delete any of them, at any moment."""
    model, prompt = load(), talk(800)
    batch = on_disk(model, tmp_path)
    expected = told(asked(batch, prompt))
    batch.save()
    other, real = on_disk(model, tmp_path), PromptStore.read
    capfd.readouterr()

    def gone(self, name):
        for file in sorted(tmp_path.iterdir())[:1]:
            file.unlink()
        return real(self, name)

    monkeypatch.setattr(PromptStore, "read", gone)
    assert told(asked(other, prompt)) == expected
    for file in tmp_path.iterdir():
        file.unlink()
    tmp_path.rmdir()
    assert told(asked(other, talk(500, 3))) == told(asked(Batch(model, 1, 1500), talk(500, 3)))
    other.save()
    assert_one_line(capfd.readouterr().err, "prompts are not kept on the disk", "cannot be written")


class Ending:
    """A file, until so many bytes are written into it and others: then something happens."""

    def __init__(self, file, room, end):
        self.file, self.room, self.end = file, room, end

    def write(self, data):
        data = bytes(data)
        self.file.write(data[:max(self.room[0], 0)])
        self.room[0] -= len(data)
        if self.room[0] < 0:
            self.file.flush()
            self.end()


def no_space():
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_one_line(load, tmp_path, capfd, monkeypatch):
    """After some bytes of a file: what is there is used, and no half file stays."""
    model, prompt, room = load(), talk(1000), [300_000]

    real = writing.write_whole
    monkeypatch.setattr(prompt_store, "write_whole", lambda name, write, *given, **more: real(
        name, lambda file: write(Ending(file, room, no_space)), *given, **more))
    batch = on_disk(model, tmp_path)
    expected = told(asked(batch, prompt))
    capfd.readouterr()
    for _ in range(3):
        batch.save()
    assert_one_line(capfd.readouterr().err, "not kept on the disk", "no space left")
    assert {file.suffix for file in tmp_path.iterdir()} == {".rows"}
    again = asked(on_disk(model, tmp_path), prompt)
    assert told(again) == expected and 0 < again.cached_tokens < 998 and again.cached_tokens % BLOCK == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_process_that_is_killed_while_it_writes(load, tmp_path, capfd):
    """By SIGKILL, at twenty places: each time the next one finds whole files only, and goes on from there."""
    model, prompt, rng = load("hybrid", "NumPy"), talk(1200), random.Random(3)
    batch, real, known = on_disk(model, tmp_path), writing.write_whole, []
    expected, statuses = told(asked(batch, prompt)), []

    def work():
        room = [rng.randrange(150_000)]

        def write_whole(name, write, *given, **more):
            real(name, lambda file: write(Ending(file, room, lambda: os.kill(os.getpid(), signal.SIGKILL))), *given,
                 **more)

        prompt_store.write_whole = write_whole
        batch.save()

    for _ in range(20):
        rng.random()
        statuses.append(forked(work))
        known.append(PromptStore(model, tmp_path, 10**9).find(np.array(prompt[:-1]))[0])
    again = asked(on_disk(model, tmp_path), prompt)
    assert known == sorted(known) and known[-1] == again.cached_tokens == 1198 and told(again) == expected
    assert len([*tmp_path.glob("*.tmp")]) == statuses.count(-signal.SIGKILL) > 2 and not capfd.readouterr().err


# ---- The budget ------------------------------------------------------------------------------------------------------

def test_what_was_not_used_for_longest_goes_first(load, tmp_path):
    """The ends of a prompt before its beginning, and nothing that the coming prompt needs."""
    model, prompts = load(), [talk(1100, seed) for seed in (1, 11, 21)]
    batch = on_disk(model, tmp_path / "one")
    asked(batch, prompts[0])
    batch.save()
    size = sum(file.stat().st_size for file in (tmp_path / "one").iterdir())
    batch = on_disk(model, tmp_path / "two", int(2.6 * size), slots=1)
    found = []
    for turn in (0, 1, 0, 2, 0, 1):
        answer = asked(batch, prompts[turn])
        found.append(answer.cached_tokens)
        assert told(answer) == told(asked(Batch(model, 1, 1500), prompts[turn]))
        assert sum(file.stat().st_size for file in (tmp_path / "two").iterdir()) <= 2.6 * size
    assert found[:2] == [0, 0] and found[2] == found[4] == 1098 and found[3] == 0
    assert 0 < found[5] < 1098 and found[5] % BLOCK == 0


def test_what_is_read_counts_as_used(load, tmp_path):
    model, caches = load(), []
    for seed in (1, 11, 21):
        caches.append(model.engine.new_cache(model.config))
        qwen3.forward(model, talk(600, seed), caches[-1])
    first, second, third = (np.array(talk(600, seed)) for seed in (1, 11, 21))
    store = PromptStore(model, tmp_path, 10**9)
    store.save(caches[0])
    store.save(caches[1])
    store.budget = sum(file.stat().st_size for file in tmp_path.iterdir()) + 2**14
    assert store.find(first)[0] == 600
    store.save(caches[2])
    assert [store.find(ids)[0] for ids in (first, second, third)] == [600, 0, 600]


@pytest.mark.parametrize("shape", ["dense", "hybrid"])
def test_a_file_that_is_missing(load, tmp_path, shape):
    """Nothing behind it is taken."""
    model, prompt = load(shape), talk(1100)
    batch = on_disk(model, tmp_path)
    expected = told(asked(batch, prompt))
    batch.save()
    for file in [*tmp_path.iterdir()]:
        content = file.read_bytes()
        file.unlink()
        assert told(asked(on_disk(model, tmp_path), prompt)) == expected
        file.write_bytes(content)


def test_half_written_files_go_as_others_do(load, tmp_path):
    name = tmp_path / f"{'a' * 40}-256.rows.01234567.tmp"
    name.write_bytes(bytes(2**22))
    os.utime(name, (1, 1))
    (tmp_path / "mine.txt").write_bytes(bytes(2**20))
    batch = on_disk(load(), tmp_path, 2**20)
    asked(batch, talk(300))
    batch.save()
    assert not name.exists() and (tmp_path / "mine.txt").exists() and len([*tmp_path.iterdir()]) > 2


def test_two_processes_share_a_folder(load, tmp_path):
    model = load()
    first, second = on_disk(model, tmp_path), on_disk(model, tmp_path)
    asked(first, talk(600))
    assert asked(second, talk(600)).cached_tokens == 0
    first.save()
    longer = asked(second, [*talk(600), 9], 30)
    assert longer.cached_tokens == 600  # its own slot's
    soon = 2 * (time.time_ns() + 10**12,)
    os.utime(tmp_path, ns=soon)
    asked(first, words(20, 3))
    second.save()
    os.utime(tmp_path, ns=soon)  # as if all of it had happened in one tick of the file system
    assert asked(first, [*talk(600), 9, *longer.token_ids, 8]).cached_tokens == 630


# ---- The same request again ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("leaves", [False, True])
def test_the_same_request_again_reads_nothing_twice(load, leaves):
    """Whether the first one's client has left or not; and requests that come after it aren't held up."""
    model, counted = load(), []
    run, expected = model.engine.run, asked(Batch(model, 1, 1500), talk(1200), 4).token_ids
    model = with_engine(model, run=lambda model, new: counted.append(len(new.token_ids)) or run(model, new))
    batch, prompt = Batch(model, 4, 1500), talk(1200)
    answers = {0: batch.add(0, prompt, max_new_tokens=4, eos_token_ids=())}
    for _ in range(3):
        batch.step()
    answers[1] = batch.add(1, prompt, max_new_tokens=4, eos_token_ids=())
    answers[2] = batch.add(2, words(50, 9), max_new_tokens=4, eos_token_ids=())
    batch.step()
    assert [request.key for request in batch.running] == [0, 2]
    if leaves:
        batch.cancel(0)
    while not batch.idle:
        batch.step()
    assert answers[1].token_ids == expected
    assert answers[1].cached_tokens >= (384 if leaves else 1199) and len(answers[2].token_ids) == 4
    assert sum(counted) <= 1200 + 50 + 3 * 4


def test_conversations_at_a_time_in_two_servers_on_one_folder(small, tmp_path):
    """Each by turns in both, with memory for some and a folder for more: answers are those of a server alone."""
    def talk(number):
        ids, answers = random.Random(number).choices(range(10, 3000), k=80), []
        for turn in range(4):
            url = servers[(number + turn) % 2].url
            got = ask(url, {"prompt": ids, "max_tokens": 8, "temperature": 0, "logprobs": 0, "ignore_eos": True})
            answers.append((got["choices"][0]["logprobs"]["tokens"], got["choices"][0]["logprobs"]["token_logprobs"]))
            n_found.append(got["usage"]["prompt_tokens_details"]["cached_tokens"])
            ids = [*ids, *small.tokenizer.encode(got["choices"][0]["text"])]
            ids += random.Random(turn).choices(range(3000), k=60)
        return answers

    def ask(url, body):
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as got:
            return json.load(got)

    def all_talks():
        with ThreadPoolExecutor(16) as clients:
            return [*clients.map(talk, range(16))]

    n_found, budget = [], 400_000
    with Served(small, slots=2) as plain:
        servers = [plain, plain]
        expected = all_talks()
    servers = [Served(small, slots=2, kept=100_000, store=PromptStore(small, tmp_path, budget)) for _ in range(2)]
    with servers[0], servers[1]:
        assert all(all_talks() == expected for _ in range(2))
        assert 0 < sum(file.stat().st_size for file in tmp_path.iterdir()) <= budget + 2**16
    n_found.clear()
    servers = [Served(small, slots=3, store=PromptStore(small, tmp_path, budget)) for _ in range(2)]
    with servers[0], servers[1]:
        assert all_talks() == expected and sum(n_found) > 1000


# ---- The command line ------------------------------------------------------------------------------------------------

def answered(capfd, *args, **more):
    status, out, err = run_main(capfd, *args, **more)
    assert status == 0 and not err, err
    return json.loads(out)


def test_the_command_line_finds_its_prompts_again(capfd, tmp_path):
    options = ("--keep-on-disk", f"{tmp_path / 'kept'}:1GB", "--system", "You are a helpful assistant.", "--json")
    first, again = (answered(capfd, *options, FRANCE) for _ in range(2))
    assert (first["cached_tokens"], again["text"]) == (0, first["text"])
    assert 0 < again["prompt_tokens"] - again["cached_tokens"] < 10
    other = answered(capfd, *options, "What is the capital of Italy?")
    assert "Rome" in other["text"]
    assert_cli_refuses(capfd, [*options[1:], "--keep-on-disk", tmp_path / "none" / "\0"], "null")
    assert "--keep-on-disk" in run_main(capfd, "--prompt-cache", "x", FRANCE)[2]
    for wrong, said in (("", "the name of a folder"), (":5GB", "the name of a folder"), ("{}:-3GB", "size"),
                        ("{}:3XB", "size"), ("{}:0.5.5", "size"), ("{}:abc", "'abc'"), ("{}:", "size"),
                        (r"C:\kept:GB", "'GB'")):
        assert_cli_refuses(capfd, ["--keep-on-disk", wrong.format(tmp_path / "kept"), FRANCE], "--keep-on-disk", said)
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_folders_with_a_colon(demo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text, folder, limit in ((r"C:\kept", r"C:\kept", "20GB"), (r"C:\2024", r"C:\2024", "20GB"),
                                ("a:b/", "a:b", "20GB"), (r"C:\kept:5GB", r"C:\kept", "5GB")):
        store = prompt_store_of(argparse.Namespace(keep_on_disk=text), demo)
        assert (tmp_path / folder).is_dir() and store.budget == checked_size("", limit)


def test_a_chat_finds_its_conversation_again(capfd, tmp_path):
    options = ("--chat", "--stats", "--keep-on-disk", tmp_path / "kept")
    talks = [run_main(capfd, *options, stdin=f"{FRANCE}\nWhat is the capital of Peru?\n".encode()) for _ in range(2)]
    assert talks[0][:2] == talks[1][:2] and "Lima" in talks[0][1]
    assert "cached" not in talks[0][2].splitlines()[0] and talks[0][2] != talks[1][2]
