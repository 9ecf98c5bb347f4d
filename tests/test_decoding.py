"""qwen3_lib/server/decoding.py, and uploads of strangers: sounds that hang, lie, stop in the middle, or are too many.

The server is a real process, whose `ffmpeg` is a script.
"""
import contextlib
import gc
import http.client
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import qwen3
from configs import ROOT
from helpers import assert_one_line, message_of
from serving import TRANSCRIPTIONS, Served, form, received, started, until  # it skips where the server needs packages
from qwen3_lib.server import decoding, transcriptions, vetting, web
from qwen3_lib.server.decoding import Upload
from qwen3_lib.server.transcriptions import EARS, Ears

pytest.importorskip("python_multipart")
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
HEARING = ROOT / "tests/tiny_hearing"
SPEECH, OTHER = (HEARING / "speech.wav").read_bytes(), b"only ffmpeg reads this"
STREAM = '--x\r\nContent-Disposition: form-data; name="stream"\r\n\r\ntrue\r\n'
HANGS = "trap '' TERM; sleep 1000 & sleep 1000"
ENDLESS = "exec cat /dev/zero"  # samples without end


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Writes an `ffmpeg` that comes first in the PATH."""
    def write(script, shell="/bin/sh"):
        program = tmp_path / "bin/ffmpeg"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{shell}\n{script}\n")
        program.chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    return write


class Process:
    """A server in a process of its own."""

    def __init__(self, *options, **more):
        self.mark = uuid.uuid4().hex
        self.process, lines = started("--model", str(HEARING), "--no-fast", *options, **more, STARTED_BY=self.mark)
        self.port = int(lines[-1].rpartition(":")[2].partition("/")[0])
        self.before = self.children()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for pid in self.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def children(self):
        """The numbers of all processes that it and its children have started: they inherit its own variable."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"STARTED_BY={self.mark}".encode() in (folder / "environ").read_bytes():
                    found.add(int(folder.name))
        return found - {self.process.pid}

    def files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def resident(self):
        """Bytes of memory."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    def send(self, sound=OTHER, fields=""):
        """A connection that has sent an upload."""
        body, headers = form(sound, fields)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=100)
        head = f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Length: {len(body)}\r\nContent-Type: {headers['Content-Type']}\r\n\r\n"
        connection.sendall(head.encode())
        connection.sendall(body)
        return connection

    def ask(self, *given):
        """All that comes back for an upload."""
        with self.send(*given) as connection:
            return b"".join(iter(lambda: connection.recv(2**16), b""))

    def hears(self):
        """Whether a good sound is written down."""
        return self.ask(SPEECH).startswith(b"HTTP/1.1 200 ")

    def ends(self, seconds=40):
        """SIGTERM -> the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def test_an_ffmpeg_that_hangs_keeps_nothing_beyond_the_time(fake):
    """It doesn't hear SIGTERM, and has children of its own. Whole and streamed; then the server ends, too."""
    fake(HANGS)
    with Process("--timeout", "4") as server, ThreadPoolExecutor(EARS + 4) as threads:
        n_files = server.files()
        answers = [*threads.map(lambda i: server.ask(OTHER, STREAM * (i % 2)), range(EARS + 4))]
        assert all(b"not finished within 4 seconds" in answer for answer in answers)
        assert server.hears()
        until(lambda: server.children() == server.before and server.files() <= n_files)
        with server.send():
            until(lambda: server.children() != server.before)
            assert server.ends() == 0
            until(lambda: not server.children())


def test_clients_that_leave_leave_nothing(fake):
    """12 uploads at a time, streams and others, whose ffmpeg would go on for ever; memory stays as after the first."""
    fake(ENDLESS)
    with Process() as server:
        assert server.hears()
        n_files, sizes = server.files(), []
        for _ in range(3):
            streams = [server.send(OTHER, STREAM) for _ in range(EARS)]
            for stream in streams:
                received(stream, b"200 OK")
            for stream in [*streams, *(server.send() for _ in range(12 - EARS))]:
                stream.close()
            until(lambda: server.children() == server.before and server.files() <= n_files)
            sizes.append(server.resident())
        assert max(sizes) - sizes[0] < 100e6 and server.hears()


GREEDY = """import sys
memory = bytearray(b"x") * 2**30
sys.stdout.buffer.write(bytes(64_000))
"""
NOISY = "head -c 50000000 /dev/zero >&2; exec cat /dev/zero"


def test_an_ffmpeg_has_limits_of_memory_and_of_messages(fake):
    """A gigabyte is refused to one, and another's messages about each damaged packet don't fill the disk."""
    fake(GREEDY, sys.executable)
    with Process() as server:
        assert b"HTTP/1.1 400 " in server.ask()
        fake(NOISY)
        with server.send(OTHER, STREAM) as stream:
            received(stream, b"200 OK")
            sizes = [os.stat(f"/proc/{pid}/fd/2").st_size for pid in server.children() - server.before]
        assert max(sizes) == decoding.MESSAGES


TOWER = """# one that never ends, and the grace
import sys, time, qwen3_server, qwen3_asr
qwen3_asr.audio_tower = lambda *_: time.sleep(1000)
qwen3_server.GRACE, qwen3_server.LAST = 1, 1.5
sys.exit(qwen3_server.main(sys.argv[1:]))
"""


def test_a_signal_ends_the_server_whatever_is_heard(fake):
    """A window that lasts, more that wait for it, an ffmpeg, and uploads that haven't come."""
    fake(ENDLESS)
    with Process(program=("-c", TOWER)) as server, contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(server.send(*each)) for each in [(SPEECH,), (SPEECH, STREAM), (OTHER,)] * 3]
        until(lambda: server.children() != server.before)
        assert server.ends() == 1 and b"503" in waiting[0].recv(100)
        until(lambda: not server.children())


def test_uploads_wait_on_the_disk_and_not_too_many_of_them(fake):
    """Behind others that are heard for ever, 8 of 20 MB wait in little memory; the ninth is refused for a moment."""
    with Process("--queue", "8", program=("-c", TOWER)) as server, contextlib.ExitStack() as stack:
        n_files = server.files()
        for _ in range(EARS):
            stack.enter_context(server.send(SPEECH))
        until(lambda: server.files() >= n_files + EARS)  # connections
        before = server.resident()
        waiting = [stack.enter_context(server.send(OTHER + bytes(20_000_000))) for _ in range(9)]
        [refused], *_ = select.select(waiting, [], [], 100)
        answer = received(refused, b"queue_full")
        assert b"HTTP/1.1 429 " in answer and b"retry-after: 2" in answer.lower()
        assert server.resident() - before < 80e6


def test_uploads_that_come_in_part(fake, monkeypatch):
    """All together have a limit of bytes; what those had that are gone is free again."""
    ears = []
    monkeypatch.setattr(web, "Ears", lambda *given: ears.append(Ears(*given)) or ears[0])
    monkeypatch.setattr(transcriptions, "MOST_UPLOADED", 2_850_000)
    with Served(qwen3.load_model(HEARING), slots=1) as served:
        body, headers = form(OTHER + bytes(2_000_000))
        halves = [socket.create_connection(("127.0.0.1", served.port), timeout=30) for _ in range(2)]
        for half in halves:
            half.sendall(f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
                         f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode() + body[:1_400_000])
        until(lambda: ears[0].n_bytes == 2_800_000)
        status, answer, given = served.ask(TRANSCRIPTIONS, *form(SPEECH))
        assert status == 429 and given["retry-after"] and "2,850,000 bytes" in answer["error"]["message"]
        for half in halves:
            half.close()
        until(lambda: not ears[0].n_bytes)
        assert served.ask(TRANSCRIPTIONS, *form(SPEECH))[0] == 200


@pytest.mark.parametrize("context", [150, 4096], ids=["parts are answered", "the first part is heard"])
def test_nothing_of_an_upload_stays(fake, context):
    """Heard, refused, left at several moments: without the garbage collector, because nothing holds itself."""
    fake(ENDLESS)
    model = qwen3.load_model(HEARING)
    model = replace(model, config=replace(model.config, context_length=context))
    body, headers = form(OTHER)
    head = f"POST {TRANSCRIPTIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with Served(model, slots=1) as served:
        gc.collect()
        gc.disable()
        try:
            for seconds in (0, 0.2, 0.4, 0.6, 0.8, 1, 2):
                with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
                    connection.sendall(f"{head}Content-Type: {headers['Content-Type']}\r\n\r\n".encode() + body)
                    time.sleep(seconds)
            for sound, expected in ((SPEECH, 200), (SPEECH[:99], 400)):
                connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)  # it stays open
                with contextlib.closing(connection):
                    connection.request("POST", TRANSCRIPTIONS, *form(sound))
                    answer = connection.getresponse()
                    assert answer.read() and answer.status == expected
                    until(lambda: not any(isinstance(each, Upload) for each in gc.get_objects()))
        finally:
            gc.enable()


LITTLE = """# room on the disk
import resource, sys, qwen3_server
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
sys.exit(qwen3_server.main(sys.argv[1:]))
"""


def test_a_full_disk(fake):
    with Process(program=("-c", LITTLE)) as server:
        n_files = server.files()
        for _ in range(3):
            assert b"503" in (answer := server.ask(OTHER + bytes(5_000_000))) and b"no room on the disk" in answer
        assert server.hears()
        until(lambda: server.files() <= n_files)
        assert server.ends() == 0 and "Traceback" not in server.process.stderr.read()


@pytest.mark.parametrize("limit, script", [("SILENT", HANGS), ("SILENT", "exec >&-; sleep 1000"),
                                           ("DECODING_SECONDS", "while :; do :; done")])
def test_a_sound_that_takes_too_long(fake, monkeypatch, tmp_path, limit, script):
    """Without output, or computing for ever: its child gives it up, and leaves no process."""
    fake(script)
    monkeypatch.setattr(decoding, "child_of", lambda name: vetting.child_of(name) | {
        "args": [sys.executable, "-P", "-c", f"import {name} as room; room.{limit} = 2; room.main()"]})
    (tmp_path / "a").write_bytes(OTHER)
    upload = Upload(open(tmp_path / "a", "rb"))
    assert_one_line(message_of(lambda: [*upload.open().blocks]), "the sound: ")
    upload.close()
    assert upload.file.closed and subprocess.run(["pgrep", "-f", f"{tmp_path}/bin/ffmpeg"]).returncode == 1
