"""qwen3_lib/app/models.py: --verify names damaged files and tensors. --list is tested in test_cli_start.py."""
import hashlib
import json
import shutil

from configs import ROOT, VOCABULARY
from helpers import run_fast
from make_random_model import make_random_model
from test_qwen3_moe import MOE

DEMO = ROOT / "demo"


def cached(home):
    """The bundled model as the hub's cache keeps it: links to blobs that are named by their SHA-256 or git's SHA-1."""
    blobs, snapshot = home / "blobs", home / "snapshots/0123456789abcdef"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in DEMO.glob("*.*"):
        data = file.read_bytes()
        large = file.suffix == ".safetensors"
        name = hashlib.sha256(data) if large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        shutil.copy(file, blobs / name.hexdigest())
        (snapshot / file.name).symlink_to(f"../../blobs/{name.hexdigest()}")
    return snapshot


def flip_a_bit(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_cached_model_is_verified(tmp_path):
    snapshot = cached(tmp_path / "models--owner--demo")
    done = run_fast("--model", snapshot, "--verify", program="qwen3.py")
    assert (done.returncode, done.stderr) == (0, "") and "all checksums are right" in done.stdout
    flip_a_bit((snapshot / "model.safetensors").resolve(), -1000)
    flip_a_bit((snapshot / "tokenizer.json").resolve(), 1000)
    done = run_fast("--model", snapshot, "--verify", program="qwen3.py")
    assert done.returncode == 1 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "model.safetensors, tokenizer.json" in done.stderr and "config.json" not in done.stderr


def test_a_folder_without_checksums_cannot_be_verified():
    done = run_fast("--verify", program="qwen3.py")
    assert done.returncode == 1 and "nothing to compare with" in done.stderr


def test_a_mixture_of_experts_runs_in_both_engines(tmp_path):
    folder = make_random_model(MOE | {"vocab_size": VOCABULARY}, tmp_path / "moe", "float32")
    for program in ("qwen3.py", "qwen3_numba.py"):
        listed = json.loads(run_fast("--list", "--json", "--model", folder, program=program).stdout.splitlines()[-1])
        assert listed["runs"] and listed["why_not"] is None
        done = run_fast("--model", folder, "--max-tokens", 4, "--stats", "Hello", program=program)
        assert done.returncode == 0 and "a token goes through" in done.stderr, done.stderr
