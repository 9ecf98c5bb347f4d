"""The command line of `python qwen3.py`: options in; answers, JSON, scores or a conversation out.

Answers go to stdout, everything else to stderr. Exit status: 0; 1 for bad input, or output that can't be written, said
in one line; 2 for bad usage; 130 after Ctrl-C.
"""
import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from qwen3 import __version__, check_answers
from qwen3_lib.generation.completion import Completion, complete
from qwen3_lib.generation.messages import encoded
from qwen3_lib.generation.score import score
from qwen3_lib.app.chat import Chat, run_chat
from qwen3_lib.app.files import keep_conversation, picture_file, read_conversation, read_prompt, read_text
from qwen3_lib.app.models import print_models, readable_size, size_on_disk
from qwen3_lib.app.arguments import (Parser, add_answer_options, add_draft, add_engine_options, add_keep_on_disk,
                                     add_max_pixels, add_model_options, add_option, answer_options, load_draft,
                                     load_main, named_model, prompt_store, shown, template_option)
from qwen3_lib.app.report import as_json, cut_note, logprob_objects, print_answer, print_raw, statistics
from qwen3_lib.app.terminal import guarded, note, print_json, write
from qwen3_lib.io.errors import InputError
from qwen3_lib.io.hub import resolve_model
from qwen3_lib.io.writing import check_new_folder

# ---- Options ---------------------------------------------------------------------------------------------------------

EXAMPLES = """\
examples:
  %(prog)s "What is the capital of France?"
  %(prog)s --continue "And of Italy?"
  cat letter.txt | %(prog)s "Summarize this letter:"
  %(prog)s --model Qwen/Qwen3-0.6B --no-think "Tell me a story about a fox."
  %(prog)s --model Qwen/Qwen3.5-0.8B --image photo.jpg "What is this?"

The defaults of sampling come from the model's generation_config.json. The small bundled model always takes the most
likely token, as --greedy does; its --top-k, --top-p, --min-p and --seed have an effect only with --temperature."""


def make_parser() -> Parser:
    parser = Parser(usage="%(prog)s [options] [prompt]", epilog=EXAMPLES, hints={"--prompt-cache": "--keep-on-disk DIR "
                    "keeps prompts"}, description="Answers a prompt with a Qwen3 "
                    "model. The answer goes to stdout, everything else to stderr.",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("what to ask").add_argument
    add("prompt", nargs="*", help="the question; text from a pipe is added to it")
    add("-p", "--prompt", dest="prompt_option", metavar="TEXT", help="the question, as an option")
    add("--file", metavar="FILE", help="read the question from a file; the text follows a question on the command line")
    add("-s", "--system", metavar="TEXT", help="system prompt: how the model should answer")
    add("--system-file", metavar="FILE", help="read the system prompt from a file")
    add("--messages", metavar="FILE", help="a conversation so far: JSON, a list of messages as in OpenAI's API")
    add("--image", action="append", metavar="FILE", help="a picture that the question is about, for a Qwen3-VL or "
        "Qwen3.5; may be repeated")
    add_max_pixels(add)
    add("--tools", metavar="FILE", help="tools that the model may call: JSON, as in OpenAI's API")
    add("--raw", action="store_true", help="continue the prompt as plain text, without the chat template")
    add("--stream", action="store_true", help=argparse.SUPPRESS)  # always; people type it
    add_model_options(parser)
    add = parser.add_argument_group("a longer context").add_argument
    add("--rope-scaling", choices=["yarn"], help="stretch the context, for texts longer than the model was trained "
        "on; needs --rope-factor")
    add("--rope-factor", type=float, metavar="X", help="stretch the context X times (Qwen recommends 4)")
    add_engine_options(parser)
    group = parser.add_argument_group("what to do")
    add = group.add_mutually_exclusive_group().add_argument
    add("--chat", action="store_true", help="have a conversation; /help lists the commands in it. On a terminal, the "
        "conversation also starts when you give no prompt")
    group.add_argument("--continue", action="store_true", help="go on with the last conversation: answer the prompt, "
                       "or chat if there is no prompt")
    add("--score", action="store_true", help="do not answer the text, but print how likely the model finds it: "
        "log-likelihood, number of tokens that count (all but the first), perplexity; with --file, for each line")
    add("--list", action="store_true", help="list the models on this computer: name, size, and whether this program "
        "runs them; with --model FOLDER also the models in that folder")
    add("--download", action="store_true", help="download the model of --model, print its folder, and exit")
    add("--save-quantized", metavar="DIR", help="with --quantize: write the quantized model into a new folder, "
        "which loads faster")
    add("--compile", action="store_true", help="compile the fast engine for this CPU, and exit; for a container image "
        "that is read-only later")
    add("--ways", action="store_true", help="measure anew how this CPU reads weights fastest, print a table, and "
        "exit; the fast engine does so by itself, once")
    add("--version", action="version", version=f"qwen3 {__version__}", help="print the version")
    add = add_answer_options(parser)
    add("--hide-thinking", action="store_true", help="don't show the reasoning")
    add_option(add, "lookup")
    add_draft(add, models=True)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object: text, reasoning, tool calls, token counts, seconds")
    add("--logprobs", type=int, metavar="N", help="print the log-probability of each token and of the N most likely "
        "tokens in its place (to stderr; with --json, in the object)")
    add("--stats", action="store_true", help="print speed and memory to stderr")
    add_keep_on_disk(add)
    return parser


# Option -> the options that have no effect with it.
EXCLUDES = {
    "raw": ("system", "system_file", "messages", "image", "tools", "think", "hide_thinking", "think_budget",
            "chat_template_kwargs", "chat"),
    "chat": ("json", "logprobs"),
    "score": ("system", "system_file", "messages", "image", "tools", "think", "chat_template_kwargs", "logprobs",
              "keep_on_disk"),
    "continue": ("messages",),
    "greedy": ("temperature",),
    "system": ("system_file",),
    "json_schema": ("regex", "grammar"),
    "regex": ("grammar",),
    "save_quantized": ("rope_factor",),
}
ANSWER_NOTHING = ("list", "download", "save_quantized", "compile", "ways")


def parse_arguments(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, as far as they can be checked without reading a file; exits with status 2 for bad usage."""
    args = parser.parse_args(argv)
    args.prompt = " ".join(args.prompt) if args.prompt else None  # tell me a story, without quotes
    given = parser.given(args)
    if {"prompt", "prompt_option"} <= given:
        parser.error("there are two prompts, one of them given by -p")
    args.prompt = args.prompt if args.prompt_option is None else args.prompt_option
    parser.check(args, EXCLUDES)
    if {"rope_scaling", "rope_factor"} & given and not {"rope_scaling", "rope_factor"} <= given:
        parser.error("--rope-scaling yarn and --rope-factor X go together")
    asked = given & {"prompt", "prompt_option", "file", "messages"}
    if given & {*ANSWER_NOTHING}:
        if asked:
            parser.error("a prompt does not go with " + shown(min(given & {*ANSWER_NOTHING}), args))
        return args
    piped = not sys.stdin.isatty()
    if not asked and not args.chat:
        if not piped and given & {"raw", "score", *EXCLUDES["chat"]}:
            parser.error("there is no prompt; give one, or --chat for a conversation")
        args.chat = not piped
    files = [args.file, args.system_file, args.messages, args.tools, args.json_schema, args.grammar]
    if [*files, args.prompt].count("-") > 1:
        parser.error("only one option can read stdin")
    args.reads_stdin = args.prompt == "-" or piped and not args.chat and "-" not in files
    return args


# ---- What to do ------------------------------------------------------------------------------------------------------

def answer(args: argparse.Namespace) -> None:
    """Loads the model, answers one prompt, and keeps the conversation for --continue."""
    options, template = answer_options(args), template_option(args)
    prompt = read_prompt(args) or "" if args.raw else ""
    messages, tools = ([], None) if args.raw else read_conversation(args)
    model = load_main(args)
    store, cache = prompt_store(args, model), model.engine.new_cache(model.config)
    options = replace(options, draft=load_draft(args, model))
    if named_model(args) is None:
        hint("No --model given: the small bundled model answers. For Qwen's own: --model Qwen/Qwen3-0.6B")
    if args.raw:
        ids = encoded(model.tokenizer, prompt, model.config.context_length)
        completion = Completion(model, ids, options=options.over(model.sampling))
    else:
        completion = complete(model, messages, tools, args.think, template, options=options)
    completion.begin(cache, store)
    try:
        if args.json:
            value = as_json(completion.finish(), args.logprobs)
            print_json(value | {"reasoning": None} if args.hide_thinking else value)
        elif args.raw:
            print_raw(completion)
        else:
            print_answer(completion, args.hide_thinking)
    finally:
        if store is not None:
            store.save(cache)
    if not args.raw:
        try:
            keep_conversation([*messages, completion.message], tools)
        except InputError as error:  # a read-only home, for example
            hint(f"--continue will not find this answer: {error}")
    report(completion, args)


def hint(text: str) -> None:
    """A note for a person at a terminal; a script doesn't need it."""
    if sys.stderr is not None and sys.stderr.isatty():
        note(text)


def report(completion: Completion, args: argparse.Namespace) -> None:
    """Prints the notes that follow an answer to stderr."""
    if not args.json and (cut := cut_note(completion)):  # the JSON object has its finish_reason
        note(cut)
    if args.logprobs is not None and not args.json:
        for entry in logprob_objects(completion):
            others = "".join(f"  {other['logprob']:9.4f} {other['token']!r}" for other in entry["top"])
            note(f"{entry['logprob']:9.4f} {entry['token']!r}{' |' if others else ''}{others}")
    if args.stats:
        note(statistics(completion))


def print_scores(args: argparse.Namespace) -> None:
    """Prints log-likelihood, tokens and perplexity of the prompt, and of each line of --file.

    The first token of a text is given, so a text of n tokens has n - 1 whose probability counts.
    """
    texts = [] if args.prompt in (None, "-") else [args.prompt]
    texts += [] if args.file is None else read_text(args.file).split("\n")
    texts = texts or [read_text("-")]
    model = load_main(args)
    for text in texts:
        ids = model.tokenizer.encode(text)
        n, total = max(len(ids) - 1, 0), float(sum(score(model, ids))) if ids else 0.0
        mean = -total / n if n else math.inf
        perplexity = math.exp(mean) if mean < 700 else None  # beyond, it is no float
        if args.json:
            print_json({"logprob": round(total, 4), "tokens": n,
                        "perplexity": None if perplexity is None else round(perplexity, 4), "text": text})
        else:
            write(f"{total:.4f}\t{n}\t{'-' if perplexity is None else f'{perplexity:.4f}'}\t{text}\n")


def start_chat(args: argparse.Namespace) -> int:
    """A conversation on the terminal, or with lines from a pipe -> exit status."""
    options, template = answer_options(args), template_option(args)
    messages, tools = read_conversation(args)
    images = [*map(picture_file, args.image or ())] if args.prompt is None and args.file is None else []
    model = load_main(args)
    check_answers(model)  # before somebody types a question
    options = replace(options, draft=load_draft(args, model))
    return run_chat(Chat(model, messages, tools, args.think, args.hide_thinking, options, args.stats, template,
                         prompt_store(args, model)), images)


def run_download(args: argparse.Namespace) -> None:
    """Downloads the model, unless it is there, and prints where it is."""
    if (name := named_model(args)) is None:
        raise InputError("--download needs --model NAME")
    write(f"{resolve_model(name, args.offline)}\n")


def run_save(args: argparse.Namespace) -> None:
    """Writes the model, quantized by the fast engine, into a new folder."""
    if args.quantize is None:
        raise InputError("--save-quantized needs --quantize int8 or --quantize int4")
    from qwen3_lib.io.packed import save_quantized as save
    check_new_folder(args.save_quantized)
    save(load_main(args), args.save_quantized, args.quantize)
    size = readable_size(size_on_disk(Path(args.save_quantized)))
    note(f"Written: {args.save_quantized}, {size}, {args.quantize}. It loads with --model {args.save_quantized}")


def compile_ahead(_args: argparse.Namespace) -> None:
    """Compiles the fast engine, and says where its machine code is kept."""
    from qwen3_numba import compile_all
    note(f"Compiled: {compile_all()}")


def measure_ways(_args: argparse.Namespace) -> None:
    """Measures the fast engine's ways anew, and prints the times of all of them."""
    from qwen3_numba import ways_table
    write("\n".join(ways_table()) + "\n")


JOBS: dict[str, Callable[[argparse.Namespace], None]] = {
    "list": print_models, "download": run_download, "save_quantized": run_save, "compile": compile_ahead,
    "ways": measure_ways, "score": print_scores}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line -> exit status."""
    def work() -> int:
        args = parse_arguments(make_parser(), argv)
        if args.chat:
            return start_chat(args)
        job = next((job for job in JOBS if getattr(args, job) not in (None, False)), None)
        (answer if job is None else JOBS[job])(args)
        return 0

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
