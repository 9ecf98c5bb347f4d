"""The command line of `python qwen3_asr.py`: sounds in; text, JSON or subtitles out.

The text goes to stdout, everything else to stderr. Exit status as in cli.py.
"""
import argparse
import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from qwen3 import Model
from qwen3_asr import LANGUAGES, language_named
from qwen3_lib.app.cli import guarded
from qwen3_lib.app.files import fingerprint
from qwen3_lib.app.options import Parser, add_engine_options, add_model_options, load_main
from qwen3_lib.app.subtitles import cues
from qwen3_lib.app.terminal import Page, engine_name, model_name, note, peak_memory, print_json
from qwen3_lib.generation.aligner import Word
from qwen3_lib.generation.transcript import LONGEST_PART, Part, Transcript, joined_text, languages
from qwen3_lib.io.errors import InputError, brief, counted, read_json_object
from qwen3_lib.io.progress import NoBar, progress
from qwen3_lib.io.sounds import open_sound
from qwen3_lib.io.writing import check_place, write_json, write_whole

ALIGNER = "Qwen/Qwen3-ForcedAligner-0.6B"
OUTPUT_FORMS = ("txt", "srt", "vtt", "json")
SUBTITLE = 20  # seconds of a part whose text is a subtitle


def make_parser() -> Parser:
    parser = Parser(usage="%(prog)s [options] sound ...", description="Writes down what is said in sounds, by a "
                    "Qwen3-ASR. The text goes to stdout, everything else to stderr.")
    add = parser.add_argument_group("what to hear").add_argument
    add("sounds", nargs="+", metavar="sound", help="a WAV file, or - for stdin; FLAC, OGG and MP3 need the packages "
        "soundfile and soxr, other files the program ffmpeg")
    add("--language", metavar="NAME", help="the language that is spoken, such as English or en (default: the "
        f"model finds out); one of {', '.join(LANGUAGES.values())}")
    add("--context", metavar="TEXT", help="words that the sound is likely to hold, names for example")
    add("--part", type=float, metavar="SECONDS", help="hear a longer sound in parts of about so many seconds, cut "
        f"where it is quiet (default: {LONGEST_PART}; {SUBTITLE} for .srt and .vtt)")
    add("--words", action="store_true", help="tell when each word is said, in JSON; .srt and .vtt take these times, not "
        "each text's share of the characters")
    add("--aligner", metavar="NAME", help=f"the model that --words takes (default: {ALIGNER})")
    add_model_options(parser, "none")
    add_engine_options(parser)
    add = parser.add_argument_group("output").add_argument
    add("-n", "--max-tokens", type=int, metavar="N", help="most tokens of a part's text (default: 13 for each second "
        "of it, and 64 more)")
    add("--out", metavar="FILE", help="write the text to FILE, part by part, in the form that its name ends with: "
        f".{', .'.join(OUTPUT_FORMS)}; the same command continues a stopped one, which FILE.job describes")
    add("--json", action="store_true", help="print one JSON object for each sound: text, language, seconds, parts")
    add("--stats", action="store_true", help="print speed and memory to stderr")
    return parser


# ---- Forms of a transcript -------------------------------------------------------------------------------------------

def clock(seconds: float) -> str:
    """Hours, minutes, seconds and thousandths: 00:01:02.345."""
    minutes, rest = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}.{rest % 1000:03}"


def as_object(parts: Sequence[Part]) -> dict[str, Any]:
    return {"text": joined_text(parts), "language": languages(parts), "seconds": parts[-1].end if parts else 0.0,
            "parts": [{key: value for key, value in asdict(part).items() if value != ()} for part in parts]}


def file_text(parts: Sequence[Part], form: str) -> str:
    """A transcript as the text of a file in one of OUTPUT_FORMS."""
    if form == "json":
        return json.dumps(as_object(parts), ensure_ascii=False, indent=2) + "\n"
    if form == "txt":
        return joined_text(parts) + "\n"
    subtitles = [(f"{clock(start)} --> {clock(end)}\n", text) for start, end, text in cues(parts)]
    if form == "vtt":
        return "\n".join(["WEBVTT\n", *(f"{time}{escape(text, quote=False)}\n" for time, text in subtitles)])
    return "\n".join(f"{i}\n{time.replace('.', ',')}{text}\n" for i, (time, text) in enumerate(subtitles, 1))


# ---- What to do ------------------------------------------------------------------------------------------------------

class Output:
    """FILE of --out. FILE.job beside it says what the job is, and has the parts so far: a stopped job goes on there."""

    def __init__(self, name: str, about: dict[str, Any]):
        self.name, self.form, self.about = name, output_form(name), about
        self.job = f"{name}.job"
        former = read_json_object(Path(self.job)) if os.path.exists(self.job) else {"about": about, "parts": []}
        if os.path.lexists(name) and not os.path.exists(self.job):
            raise InputError(f"{name}: exists already, and no {self.job} describes it; give another --out")
        if former.get("about") != about:
            raise InputError(f"{name}: belongs to another sound, model or options, see {self.job}; give another --out")
        before: Any = former["parts"]
        self.parts = [Part(**part | {"words": tuple(Word(**word) for word in part["words"])}) for part in before]
        check_place(name)

    def write(self) -> None:
        """Writes both files anew, each whole or not at all."""
        write_json(self.job, {"about": self.about, "parts": [asdict(each) for each in self.parts]})
        text = file_text(self.parts, self.form).encode("utf-8", "replace")
        write_whole(self.name, lambda file: file.write(text))


def output_form(name: str) -> str:
    form = name.rpartition(".")[2].lower()
    if form not in OUTPUT_FORMS:
        raise InputError(f"--out must be a file whose name ends with .{', .'.join(OUTPUT_FORMS)}, not {brief(name)}")
    return form


def speech_job(args: argparse.Namespace, source: str | bytes, model: Model, longest: float) -> dict[str, Any]:
    """What a job is, for FILE.job."""
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"sound's sha256": digest, "model": model_name(model), "engine": engine_name(model),
            "model's sha256": fingerprint(model, model.engine.new_cache(model.config)), "part": longest,
            "language": args.language, "context": args.context, "max_tokens": args.max_tokens,
            "words": args.words and (args.aligner or ALIGNER)}


def hear_sounds(args: argparse.Namespace) -> int:
    """Writes down the sounds, one after the other -> exit status."""
    subtitles = args.out is not None and output_form(args.out) in ("srt", "vtt") and not args.words
    longest = args.part if args.part is not None else SUBTITLE if subtitles else LONGEST_PART
    if args.out is not None and len(args.sounds) > 1:
        raise InputError("--out takes the text of one sound")
    language_named(args.language)
    sources = [sys.stdin.buffer.read() if name == "-" and sys.stdin else name for name in args.sounds]
    recordings = [*map(open_sound, sources)]  # what can't be read is said before a model is loaded
    model = load_main(args)
    wanted = argparse.Namespace(**vars(args) | {"model": args.aligner or ALIGNER, "adapter": None})
    words: Any = load_main(wanted) if args.words else False
    output = None if args.out is None else Output(args.out, speech_job(args, sources[0], model, longest))
    for recording in recordings:
        hear_sound(args, Transcript(model, recording, args.language, args.context, longest, words,
                                    () if output is None else output.parts, max_tokens=args.max_tokens), output)
    if subtitles:
        note("Each subtitle has a time by its share of the characters; --words tells when each word is said.")
    return 0


def hear_sound(args: argparse.Namespace, transcript: Transcript, output: Output | None) -> None:
    page, began, before = Page(), time.perf_counter(), transcript.heard[-1].end if transcript.heard else 0.0
    streams = output is None and not args.json
    with NoBar() if streams and sys.stdout.isatty() else progress(  # there, the text itself shows it
            description="hearing", total=transcript.recording.seconds, initial=before,
            bar_format="{l_bar}{bar}| {n:.0f} s [{elapsed}<{remaining}]") as bar:
        for event in transcript.events:
            if isinstance(event, str):
                if streams:
                    page.write(event)
                continue
            bar.update(event.end - event.start)
            if not streams:  # else after the text, which may stand on the same terminal
                bar.clear()
                tell_cut(event)
            if output is not None:
                output.parts.append(event)
                output.write()
    if streams:
        page.end()
        for part in transcript.heard:
            tell_cut(part)
    elif output is not None:
        output.write()  # if there was nothing to hear any more
    else:
        print_json(as_object(transcript.heard))
    if args.stats:
        note(statistics_of(transcript, before, time.perf_counter() - began))


def tell_cut(part: Part) -> None:
    """Says on stderr if a part's text was cut off."""
    if part.finish_reason != "stop":
        what = "it goes round in circles" if part.finish_reason == "loop" else "raise --max-tokens for more"
        note(f"From {clock(part.start)} to {clock(part.end)}: the text was ended after "
             f"{counted(part.n_tokens, 'token')}: {what}.")


def statistics_of(transcript: Transcript, before: float, seconds: float) -> str:
    """One line: how long the sound is and how long it took, the tower, memory, engine. `before`: heard earlier."""
    sound, n = transcript.seconds - before, sum(part.n_tokens for part in transcript.heard if part.start >= before)
    share = f" ({seconds / sound:.3f} of its length)" if sound else ""
    parts = [f"sound: {sound:.1f} s in {seconds:.2f} s{share}, the tower {transcript.tower_seconds:.2f} s",
             f"text: {counted(n, 'token')}"]
    if (peak := peak_memory()) is not None:
        parts.append(f"peak memory: {peak / 1e9:.2f} GB")
    return " | ".join([*parts, engine_name(transcript.model)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.check(args, {"out": ("json",)})
    return guarded(lambda: hear_sounds(args))
