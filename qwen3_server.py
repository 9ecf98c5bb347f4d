# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "safetensors>=0.8", "tokenizers>=0.22.2", "huggingface_hub>=1.33", "tqdm>=4.66",
#                 "jinja2>=3.1.6", "prompt_toolkit>=3.0.40", "threadpoolctl>=3.5", "numba>=0.62",
#                 "starlette>=1.0", "uvicorn>=0.50", "llguidance>=1.9", "pillow>=10.3",
#                 "python-multipart>=0.0.27"]
# ///
"""A server that speaks OpenAI's API, and Anthropic's, with either engine.

    python qwen3_server.py                                  the small bundled model, at http://127.0.0.1:8080/v1
    python qwen3_server.py --model 0.6B --fast

    curl http://127.0.0.1:8080/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'

One thread answers all requests together: see qwen3_batch.py. An answer with a seed is the same whatever else runs
(with the fast engine, to the last bit). The parts stand in qwen3_lib/server/.
"""
from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from importlib.util import find_spec
from types import FrameType

if __name__ == "__main__" and None in map(find_spec, ("qwen3", "qwen3_lib")):
    sys.exit("qwen3_server.py: it needs qwen3.py and the folder qwen3_lib beside it")

from qwen3 import InputError, Model, checked_whole
from qwen3_asr import hears, sounds_of
from qwen3_batch import MOST_SLOTS, Batch, free_memory, positions_in, slots_in
from qwen3_lib.app.terminal import guarded, note
from qwen3_lib.app.files import read_text
from qwen3_lib.app.arguments import (Parser, add_draft, add_engine_options, add_keep_on_disk, add_max_pixels,
                                     add_model_options, answer_options, checked_size, load_main, prompt_store)
from qwen3_lib.app.models import readable_size
from qwen3_lib.io.facts import banner
from qwen3_lib.generation.aligner import check_aligner
from qwen3_lib.io.errors import brief, counted
from qwen3_tts import speaks, voices_of

try:
    import uvicorn

    from qwen3_lib.server.protocol import Protocol
    from qwen3_lib.server.rendering import Renderer
    from qwen3_lib.server.transcriptions import EARS
    from qwen3_lib.server.web import LOCAL, Limits, make_app
    from qwen3_lib.server.worker import Worker
except ImportError as error:  # an extra that a plain installation leaves out
    missing: ImportError | None = error
else:
    missing = None

AT_LEAST = 2  # answers for which the default context leaves memory: an agent asks for titles beside its conversation
KEPT = 3  # earlier prompts and answers take one byte in so many of --memory
LISTENED = 2048  # tokens of --listen's model: 68 seconds of sound and their text
GRACE = 10.0  # seconds that running answers have after SIGTERM
LAST = 4.0  # seconds after that until the process ends, whatever runs
WRITING = 60.0  # seconds more for writing --keep-on-disk, unless a second signal comes


CALLED = {"--ctx-size": "--context", "-c": "--context", "--max-model-len": "--context", "--num-ctx": "--context",
          "--parallel": "--slots", "-np": "--slots", "--max-num-seqs": "--slots", "--allowed-origins": "--cors"}
SERVERS_HINTS = {name: f"it is called {ours}" for name, ours in CALLED.items()} | {
    "--api-key": "the key stands in a file, --api-key-file FILE, or in $QWEN3_API_KEY",
    "--served-model-name": "any name of a model is answered", "--alias": "any name of a model is answered"}


def make_parser() -> Parser:
    parser = Parser(description="Answers requests over HTTP in the form of OpenAI's API, or of Anthropic's.",
                    hints=SERVERS_HINTS)
    add = parser.add_argument_group("who may ask").add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on; 0.0.0.0 lets other machines ask "
        "(default: %(default)s)")
    add("--port", type=int, default=8080, metavar="N", help="port to listen on; 0 takes a free one (default: "
        "%(default)s)")
    add("--api-key-file", metavar="FILE", help="clients must send the key in this file as their API key (default: "
        "$QWEN3_API_KEY, otherwise everybody may ask)")
    add("--cors", action="append", default=[], metavar="ORIGIN", help="web pages from this origin may ask, such as "
        "https://example.org; may be repeated")
    add_model_options(parser)
    parser.add_argument("--aligner", metavar="NAME", help="a Qwen3-ForcedAligner, which tells when each word of a "
                        "sound is said")
    parser.add_argument("--listen", metavar="NAME", help="another model, a Qwen3-ASR, which hears sounds")
    parser.add_argument("--speech", metavar="NAME", help="another model, a Qwen3-TTS, which speaks texts")
    add = parser.add_argument_group("memory and limits").add_argument
    add("--context", type=int, metavar="N", help="most tokens of a prompt and its answer together (default: "
        f"as much as --memory holds for {AT_LEAST} answers or for --slots, up to the model's context)")
    add("--slots", type=int, metavar="N", help="most answers at the same time (default: as many as fit into --memory, "
        f"at most {MOST_SLOTS})")
    add("--memory", metavar="SIZE", help="memory for keys and values, those of all slots and of --keep, such as 4GB "
        "(default: half of the free memory)")
    add("--keep", metavar="SIZE", help="how much of --memory is for earlier prompts and answers, so that a "
        "conversation that goes on isn't computed again (default: a third)")
    add_keep_on_disk(add)
    add("--queue", type=int, default=64, metavar="N", help="how many answers may wait for a slot, and how "
        "many sounds may wait to be heard (default: %(default)s)")
    add("--timeout", type=float, default=600, metavar="S", help="longest time for an answer, in seconds (default: "
        "%(default)s)")
    add_max_pixels(add)
    add_engine_options(parser)
    add_draft(parser.add_argument)
    parser.add_argument("--verbose", action="store_true", help="write a line on stderr for each request: method, path, "
                        "status, seconds, tokens; never its texts")
    return parser


def load_aligner(args: argparse.Namespace) -> Model | None:
    """The model of --aligner."""
    if args.aligner is None:
        return None
    check_aligner(model := load_other(args, args.aligner), "")
    return model


def load_other(args: argparse.Namespace, name: str) -> Model:
    """Another model than --model, with its engine's options."""
    model = load_main(argparse.Namespace(**vars(args) | {"model": name, "adapter": None, "draft": None}))
    note(banner(model))
    return model


def open_listener(args: argparse.Namespace) -> Batch:
    """The model of --listen, which hears a few sounds at a time."""
    sounds_of(model := load_other(args, args.listen))
    return Batch(model, EARS, min(LISTENED, model.config.context_length))


def open_speaker(model: Model) -> Batch:
    """A model that speaks: it needs no slots. Its codec and code predictor are read now, not for the first text."""
    voices = voices_of(model)
    _ = voices.codec, voices.weights, voices.predictor(model.engine)
    return Batch(model, 1, 1)


def open_batch(args: argparse.Namespace, aligner: Callable[[], Model | None]) -> Batch:
    """Loads the models and makes room for answers."""
    memory, kept = checked_size("--memory", args.memory), checked_size("--keep", args.keep)
    model = load_main(args)
    aligner()
    note(banner(model))
    model = replace(model, tokenizer=Renderer(model.tokenizer, str(model.path)))
    if speaks(model):
        return open_speaker(model)
    if model.embeds:  # needs no slots: it gives vectors only
        return Batch(model, 1, 1)
    longest, slots, most = args.context, args.slots, model.config.context_length
    if memory is None and None in (longest, slots, kept):
        memory = free_memory() // 2
    kept = (memory or 0) // KEPT if kept is None else kept
    memory = max((memory or 0) - kept, 0)
    longest = min(max(positions_in(model, slots or AT_LEAST, memory), 2) if longest is None else longest, most)
    slots = slots_in(model, longest, memory) if slots is None else slots
    of_all = f", of the {most:,} that the model can read (--context, --memory)" if longest < most else ""
    note(f"{counted(slots, 'answer')} at a time, each of at most {longest:,} tokens with its prompt{of_all}; "
         f"{readable_size(kept)} for earlier ones (--keep)")
    return Batch(model, slots, longest, kept, prompt_store(args, model))


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; a name stands for its IPv4 address. Raises InputError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (")[0].removesuffix(".")
        raise InputError(f"cannot listen on port {port} of {brief(host)}: {reason}; --port takes another one, "
                         "--host an address of this machine") from error


def give_up() -> None:
    """Ends the process though something still runs."""
    note("stopped; what still ran was given up")
    os._exit(1)


def api_key(args: argparse.Namespace) -> str | None:
    key = os.environ.get("QWEN3_API_KEY") if args.api_key_file is None else read_text(args.api_key_file).strip()
    if key == "":
        raise InputError(f"{args.api_key_file or '$QWEN3_API_KEY'}: the key is empty")
    return key


def run(args: argparse.Namespace) -> int:
    """Serves until a signal -> exit status."""
    if missing is not None:
        raise InputError(f"{missing}; the server needs: pip install starlette uvicorn llguidance python-multipart")
    for name, least in (("context", 2), ("slots", 1), ("queue", 0), ("port", 0)):
        if getattr(args, name) is not None:
            checked_whole(f"--{name}", getattr(args, name), least)
    for origin in args.cors:
        if not re.fullmatch(r"null|[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):  # as browsers send it
            raise InputError(f"--cors must be an origin such as https://example.org, not {brief(repr(origin))}")
    options = answer_options(args).given
    key, local, errors = api_key(args), args.host in ("localhost", "127.0.0.1", "::1"), list[Exception]()

    listener, timers = listening(args.host, args.port), list[threading.Timer]()
    address = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{listener.getsockname()[1]}"
    workers = list[Worker]()

    class Uvicorn(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            grace = 0 if timers else GRACE  # at the second signal, running answers get their error
            for each in workers:
                each.end(grace)
            writing = WRITING if grace and args.keep_on_disk is not None else 0
            timers.append(threading.Timer(grace + writing + LAST, give_up))
            timers[-1].daemon = True
            timers[-1].start()
            if grace:  # uvicorn would drop the connections at the second signal
                super().handle_exit(sig, frame)

    loaded, n_models = count(1), 1 + bool(args.listen) + bool(args.speech)

    def on_load() -> None:
        if next(loaded) == n_models:  # one that fails ends the server
            model = worker.model
            page = f"a page to {'record' if hears(model) else 'chat'} on: {address}/   "
            note(f"{'' if speaks(model) or model.embeds else page}for clients: {address}/v1")

    def on_end(error: Exception) -> None:
        errors.append(error)
        server.should_exit = True

    aligner = cache(lambda: load_aligner(args))
    worker = Worker(lambda: open_batch(args, aligner), args.queue, on_end, on_load)
    hosts = (*LOCAL, *(origin.partition("://")[2].partition(":")[0] for origin in args.cors)) if local else None
    hearing = Worker(lambda: open_listener(args), args.queue, on_end, on_load) if args.listen else None
    speaking = Worker(lambda: open_speaker(load_other(args, args.speech)), args.queue, on_end, on_load) if args.speech \
        else None
    workers += filter(None, (worker, hearing, speaking))
    limits = Limits(args.timeout, key, tuple(args.cors), hosts, args.verbose, options, aligner)
    app = make_app(worker, limits, hearing, speaking)
    server = Uvicorn(uvicorn.Config(app, http=Protocol, ws="none", log_level="warning",
                                    server_header=False, timeout_graceful_shutdown=int(GRACE) + 2))
    if not local and key is None:
        note("Warning: every machine that reaches this address may ask. --api-key-file demands a key.")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again when all is done
    server.run([listener])
    for timer in timers:
        timer.cancel()
    for error in errors:
        raise error if isinstance(error, InputError | MemoryError) else InputError("the server has failed")
    totals = sum((each.totals for each in workers), Counter[str]())
    n = totals["answers_ended"] + totals["spoken_texts"] - totals["given_up"]
    note(f"stopped; {counted(n, 'answer')} {'was' if n == 1 else 'were'} finished, {totals['given_up']} given up")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status: 0 after SIGTERM or Ctrl-C, 1 if something had to be given up for it; 1 for bad
    input, in one line; 2 for bad usage."""
    return guarded(lambda: run(make_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
