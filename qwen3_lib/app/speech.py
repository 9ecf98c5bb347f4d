"""The command line of `python qwen3_asr.py`: sounds in; text, JSON or subtitles out.

The text goes to stdout, everything else to stderr. Exit status as in cli.py.
"""
import argparse
import contextlib
import hashlib
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qwen3 import Model, checked_number, checked_whole
from qwen3_asr import LANGUAGES, RATE, language_named, sounds_of
from qwen3_lib.app.terminal import (ChangingEnd, OutputError, Page, guarded, harmless, is_screen, note, print_json,
                                    write)
from qwen3_lib.generation.prompt_store import fingerprint
from qwen3_lib.app.journal import Journal, check_output
from qwen3_lib.app.arguments import Parser, add_engine_options, add_model_options, load_main, named_model
from qwen3_lib.app.subtitles import OUTPUT_FORMS, SUBTITLE, as_object, clock, cues, file_text
from qwen3_lib.io.facts import engine_name, model_name
from qwen3_lib.app.report import peak_memory
from qwen3_lib.generation.aligner import Word
from qwen3_lib.generation.dictation import LIVE_PART, Dictation
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.generation.transcript import (LONGEST_PART, Part, SpeechRequest, Transcript, checked_part, languages,
                                             usual_part)
from qwen3_lib.io.errors import InputError, brief, counted
from qwen3_lib.io.progress import NoBar, progress
from qwen3_lib.io.sounds import live_sound, open_sound
from qwen3_lib.io.writing import check_place, write_whole

ALIGNER = "Qwen/Qwen3-ForcedAligner-0.6B"
TAIL = 40  # characters of the text so far that progress shows
SPEECH_JOB = "qwen3 speech job 1"  # stands in FILE.job
HINTS = {name: f"it is called {ours}" for name, ours in {  # as Whisper's commands call them
    "--initial-prompt": "--context", "--prompt": "--context", "--output-format": "--format", "-f": "--format",
    "-l": "--language", "--word-timestamps": "--words", "--print-progress": "--timestamps"}.items()} | dict.fromkeys(
    ("-o", "--output-dir", "-of", "--output-file"),
    "--format writes a file beside each sound, --out FILE that of one") | {
    "--task": "the text is in the language that is spoken, never a translation"}


def make_parser() -> Parser:
    parser = Parser(usage="%(prog)s [options] sound ...", description="Writes down what is said in sounds, by a "
                    "Qwen3-ASR. The text goes to stdout, everything else to stderr.", hints=HINTS)
    add = parser.add_argument_group("what to hear").add_argument
    add("sounds", nargs="*", metavar="sound", help="a WAV file, or - for stdin; FLAC, OGG and MP3 need the "
        "package soundfile, or the program ffmpeg; all other files ffmpeg")
    add("--live", action="store_true", help="write down what a recorder pipes in, while it records: samples of 16 "
        "bits, 16,000 a second, one channel. On a terminal the last words may still change")
    add("--language", metavar="NAME", help="the language that is spoken, such as English or en (default: auto, the "
        f"model finds out); one of {', '.join(LANGUAGES.values())}")
    add("--context", metavar="TEXT", help="words that the sound is likely to hold, names for example")
    add("--part", type=float, metavar="SECONDS", help="hear a longer sound in parts of about so many seconds, cut "
        f"where it is quiet (default: {LONGEST_PART}; {SUBTITLE} for srt, vtt and --timestamps; {LIVE_PART} for "
        "--live; less for a small context)")
    add("--words", action="store_true", help="tell when each word is said, in JSON; srt, vtt and --timestamps take "
        "these times, not each text's share of the characters")
    add("--aligner", metavar="NAME", help=f"the model that --words takes (default: {ALIGNER})")
    add_model_options(parser, "none")
    add_engine_options(parser)
    add = parser.add_argument_group("output").add_argument
    add("-n", "--max-tokens", type=int, metavar="N", help="most tokens of a part's text (default: 13 for each second "
        "of it, and 64 more)")
    add("--format", choices=OUTPUT_FORMS, help="write a file beside each sound, part by part: a.srt beside a.mp3; the "
        "same command continues a stopped one, which a.srt.job describes")
    add("--out", metavar="FILE", help="write the text of one sound to FILE, likewise, in the form of --format, or that "
        "its name ends with; - is stdout")
    add("--overwrite", action="store_true", help="replace files that are there already")
    add("--json", action="store_true", help="print a JSON object for each sound: file, text, language, seconds, parts")
    add("--timestamps", action="store_true", help="print the text with its times while it is heard")
    add("--stats", action="store_true", help="print speed and memory to stderr")
    return parser


# ---- What to do ------------------------------------------------------------------------------------------------------

class Output(Journal):
    """The file of --out or --format. FILE.job keeps the parts until all sounds of the command are written down."""
    below, way_out = True, "replace it with --overwrite"

    def __init__(self, name: str, form: str, about: dict[str, Any], overwrite: bool, seconds: float | None):
        """`seconds`: of the whole sound, where known. `earlier`: the parts of an earlier run; `end`: their end."""
        self.form, self.seconds, self.earlier, self.end = form, seconds, list[Part](), 0.0
        super().__init__(name, about, overwrite)

    @property
    def so_far(self) -> str:
        whole = "" if self.seconds is None else f" of {clock(self.seconds)}"
        return f"{clock(self.end)}{whole}" if self.end else ""

    def take(self, line: bytes) -> bool:
        if (part := part_in(line, self.end)) is not None:
            self.earlier.append(part)
            self.end = part.end
        return part is not None

    def write(self, parts: list[Part]) -> None:
        """Writes the last one of the parts: into the file first, so that it has all parts of the journal."""
        text = (file_text(parts, self.form) or "\n").encode("utf-8", "replace")  # never an empty file
        try:
            write_whole(self.path, lambda file: file.write(text), alone=True)
        except InputError as error:
            raise InputError(f"{error}{self.way_on}") from error
        self.append(asdict(parts[-1]))
        self.sync()
        self.end = parts[-1].end


def part_in(line: bytes, start: float) -> Part | None:
    """The part in a line of FILE.job that begins at `start`; None for a damaged line."""
    try:
        value = json.loads(line)
        part = Part(**value | {"words": tuple(Word(**word) for word in value["words"])})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    kinds = [*map(type, (part.start, part.end, part.text, part.language, part.finish_reason, part.n_tokens))]
    right = kinds == [float, float, str, str, str, int] and part.start == start < part.end < math.inf and all(
        [type(word.text), type(word.start), type(word.end)] == [str, float, float] for word in part.words)
    return part if right and line.endswith(b"\n") else None


def output_form(name: str) -> str:
    form = name.rpartition(".")[2].lower()
    if form not in OUTPUT_FORMS:
        raise InputError(f"--out must be a file whose name ends with .{', .'.join(OUTPUT_FORMS)}, or - for stdout, not "
                         f"{brief(name)}; or give a --format")
    return form


@dataclass(frozen=True)
class Task:
    """A sound, and the file for its text; None: stdout."""
    name: str
    source: str | bytes
    output: str | None


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """What the command line asks for. Raises InputError where a file can't take a text."""
    tasks = list[Task]()
    for name in args.sounds:
        beside = f"{os.path.splitext(name)[0]}.{args.format}" if args.format and name != "-" else None
        output = None if args.out == "-" else args.out or beside
        if output is not None and os.path.realpath(output) in [os.path.realpath(each.output or "") for each in tasks]:
            raise InputError("--out takes the text of one sound; --format srt writes a file beside each" if args.out
                             else f"{brief(output)}: would be the text of two sounds")
        tasks.append(Task(name, sys.stdin.buffer.read() if name == "-" and sys.stdin else name, output))
    return tasks


def check_task(args: argparse.Namespace, task: Task) -> Task:
    """The task. Raises InputError for a sound that can't be read and a file that can't be written: before a model is
    loaded."""
    next(open_sound(task.source).blocks, None)
    if task.output is not None:
        if os.path.realpath(task.output) in map(os.path.realpath, args.sounds):
            raise InputError(f"{task.output}: is the sound itself; give another --out")
        check_output(task.output, args.overwrite, Output.way_out)
        check_place(task.output)
    return task


def speech_job(args: argparse.Namespace, source: str | bytes, model: Model, longest: float,
               form: str) -> dict[str, Any]:
    """What a job is, for FILE.job."""
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"format": SPEECH_JOB, "sound's sha256": digest, "model": model_name(model), "engine": engine_name(model),
            "model's sha256": fingerprint(model, model.engine.new_cache(model.config)), "part": longest,
            "language": args.language, "context": args.context, "max_tokens": args.max_tokens,
            "words": args.words and (args.aligner or ALIGNER), "form": form}


def check_model(args: argparse.Namespace) -> None:
    """Raises InputError unless a model is named, and for wrong options of all its answers."""
    if named_model(args) is None:
        raise InputError("name a model that hears: --model Qwen/Qwen3-ASR-0.6B (1.9 GB, downloaded once), or "
                         "Qwen/Qwen3-ASR-1.7B (4.7 GB)")
    language_named(args.language)
    if args.max_tokens is not None:
        checked_whole("--max-tokens", args.max_tokens, 1)


def dictate(args: argparse.Namespace) -> int:
    """Writes down what comes from stdin, while it comes -> exit status."""
    check_model(args)
    if args.part is not None:
        checked_number("--part", args.part, 4, 1200)
    if sys.stdin.isatty():
        raise InputError("--live hears what a recorder pipes in: arecord -q -f S16_LE -r 16000 | python qwen3_asr.py "
                         "--live")
    sound = live_sound(getattr(sys.stdin.buffer, "raw", sys.stdin.buffer))  # before the model is loaded: a minute waits
    dictation = Dictation(load_main(args), sound, args.language, args.context, args.part,
                          AnswerOptions(max_new_tokens=args.max_tokens))
    page, screen, n = Page(), ChangingEnd() if is_screen(sys.stdout) else None, 0  # n: characters that stay
    try:
        for end in dictation:
            if screen is not None:
                screen.show(dictation.so_far[n:], end)
            else:
                page.write(dictation.so_far[n:])
            n = len(dictation.so_far)
    finally:
        if dictation.step_seconds:
            page.end()
    for part in dictation.heard:
        tell_cut(part)
    if args.stats:
        steps = dictation.step_seconds
        note(statistics_of(dictation, f"{len(steps)} steps, the longest {max(steps):.2f} s"))
    return 0


def hear_sounds(args: argparse.Namespace) -> int:
    """Writes down the sounds, one after the other -> exit status: 1 if one of several could not be."""
    check_model(args)
    form = args.format or ("" if args.out in (None, "-") else output_form(args.out))
    in_cues = (args.timestamps or form in ("srt", "vtt")) and not args.words
    if args.part is not None:
        checked_part("--part", args.part, args.words)
    if not (tasks := [*possible(lambda task: check_task(args, task), tasks_of(args))]):
        return 1
    sounds_of(model := load_main(args))
    most = SUBTITLE if in_cues or args.timestamps else LONGEST_PART
    longest = usual_part(model.config.context_length, most) if args.part is None else args.part
    wanted = argparse.Namespace(**vars(args) | {"model": args.aligner or ALIGNER, "adapter": None})
    words: Any = load_main(wanted) if args.words else False

    def hear(task: Task) -> Output | None:
        recording, output = open_sound(task.source), None
        if task.output is not None:
            output = Output(task.output, form, speech_job(args, task.source, model, longest, form), args.overwrite,
                            recording.seconds)
        with output or contextlib.nullcontext():
            transcript = Transcript(model, recording, args.language, args.context, longest, words,
                                    () if output is None else output.earlier, max_new_tokens=args.max_tokens)
            hear_sound(args, transcript, output, form, task.name)
        return output

    done = [*possible(hear, tasks)]
    if in_cues and done:
        note("Sentences have times by their share of the characters; --words tells when each word is said.")
    for output in filter(None, done) if len(done) == len(tasks) else ():
        output.forget()
    return 0 if len(done) == len(args.sounds) else 1


def possible(work: Callable[[Task], Any], tasks: list[Task]) -> Iterator[Any]:
    """work(task) of each task. Of several sounds, one that fails is named on stderr, and the others go on."""
    for task in tasks:
        try:
            yield work(task)
        except InputError as error:
            if len(tasks) == 1 or isinstance(error, OutputError):
                raise
            named = {task.name, task.output or task.name}
            note(f"{error}" if any(name in str(error) for name in named) else f"{task.name}: {error}")


def hear_sound(args: argparse.Namespace, transcript: Transcript, output: Output | None, form: str,
               name: str) -> None:
    """Hears the parts that are left, and writes them where they belong; on stdout in one of OUTPUT_FORMS, or "": as
    they come."""
    page, began, before = Page(), time.perf_counter(), transcript.heard[-1].end if transcript.heard else 0.0
    streams = output is None and not args.json and not args.timestamps and form in ("", "txt")
    if output is None and len(args.sounds) > 1 and not args.json:
        write(f"{name}:\n")
    form_of_bar = "{desc}: {n:.0f} s [{elapsed}]{postfix}" if (seconds := transcript.recording.seconds) is None else \
        "{l_bar}{bar}| {n:.0f} s [{elapsed}<{remaining}]{postfix}"
    with NoBar() if streams and sys.stdout.isatty() else progress(  # there, the text itself shows it
            description="hearing", delay=0, total=seconds, initial=before, bar_format=form_of_bar) as bar:
        for event in transcript.events:
            if isinstance(event, str):
                if streams:
                    page.write(event)
                bar.set_postfix_str(harmless(" ".join(transcript.so_far[-TAIL:].split()), sys.stderr))
                continue
            if output is not None:
                output.write(transcript.heard)
            bar.clear()
            if args.timestamps:
                for start, end, text in cues([event]):
                    write(f"[{clock(start)} --> {clock(end)}] {text}\n")
            if not streams:  # else after the text, which may stand on the same terminal
                tell_cut(event)
            bar.update(event.end - event.start)
            bar.refresh()
    if streams:
        page.end()
        for part in transcript.heard:
            tell_cut(part)
    elif output is not None:
        heard = languages(transcript.heard) or "no speech"
        note(f"{output.name}: {clock(transcript.heard[-1].end)} heard, {heard}")
    elif args.json:
        print_json({"file": name} | as_object(transcript.heard))
    elif form:
        write(file_text(transcript.heard, form))
    if args.stats:
        seconds, length = time.perf_counter() - began, transcript.seconds - before
        share = f" ({seconds / length:.3f} of its length)" if length else ""
        note(statistics_of(transcript, f"{seconds:.2f} s{share}", before))


def tell_cut(part: Part) -> None:
    """Says on stderr if a part's text was cut off."""
    if part.finish_reason != "stop":
        what = "it goes round in circles" if part.finish_reason == "loop" else "raise --max-tokens for more"
        note(f"From {clock(part.start)} to {clock(part.end)}: the text was ended after "
             f"{counted(part.n_tokens, 'token')}: {what}.")


def statistics_of(request: SpeechRequest, took: str, before: float = 0.0) -> str:
    """One line: how long the sound is and how long it took, the tower, memory, engine. `before`: heard earlier."""
    sound, n = request.end / RATE - before, sum(part.n_tokens for part in request.heard if part.start >= before)
    parts = [f"sound: {sound:.1f} s in {took}, the tower {request.tower_seconds:.2f} s",
             f"text: {counted(n, 'token')}"]
    if (peak := peak_memory()) is not None:
        parts.append(f"peak memory: {peak / 1e9:.2f} GB")
    return " | ".join([*parts, engine_name(request.model)])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    parser.check(args, {"json": ("out", "format", "timestamps"), "timestamps": ("out", "format"), "live": (
        "words", "aligner", "format", "out", "overwrite", "json", "timestamps")})
    if bool(args.sounds) is args.live:
        parser.error("--live hears stdin, and takes no other sound" if args.live else
                     "the following arguments are required: sound")
    return guarded(lambda: (dictate if args.live else hear_sounds)(args))
