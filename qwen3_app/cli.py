"""The command line of `python qwen3.py`: options in; answers, JSON, scores or a conversation out.

Answers go to stdout, everything else to stderr. Exit status: 0; 1 for bad input, or output that can't be written, said
in one line; 2 for bad usage; 130 after Ctrl-C.
"""
import argparse
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from qwen3 import (BUNDLED, HERE, NUMPY, Completion, Engine, KVCache, Model, Sampling, __version__, chat, load_model,
                   score)
from qwen3_app.chat import Chat, run_chat
from qwen3_app.files import load_prompt_cache, read_messages, read_text, read_tools, save_prompt_cache
from qwen3_app.models import named_model, print_models, verify_cached
from qwen3_app.start import catch_ctrl_c, program, release_ctrl_c
from qwen3_app.state import kept_conversation
from qwen3_app.terminal import (as_json, cut_note, logprob_objects, note, print_answer, print_json, print_raw,
                                statistics, write)
from qwen3_io.arguments import checked_stop, checked_whole
from qwen3_io.checkpoint import check_answers, stretched
from qwen3_io.errors import LONGEST_LINE, InputError, brief, did_you_mean

OF_THE_FAST_ENGINE = ("--quantize", "--save-quantized", "--threads", "--compile", "--kv-dtype")

# ----------------------------------------------------------------------------------------------------------------------
# Options
# ----------------------------------------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        given = [word.partition("=")[0] for word in message.split() if re.match(r"--?\w", word)]
        if message.startswith("unrecognized arguments") and given:
            known = re.findall(r"--[a-z-]+", self.format_usage())
            there = "; qwen3_numba.py has it" if given[0] in OF_THE_FAST_ENGINE else did_you_mean(given[0], known)
            message = f"there is no option {given[0]} here{there}"
        note(f"{self.prog}: error: {brief(message, LONGEST_LINE)} (--help lists the options)")
        self.exit(2)


def add_answer_options(parser: Parser) -> Callable[..., argparse.Action]:
    """Adds the options of an answer and of how tokens are chosen -> a function that adds more to the first group."""
    add = add_more = parser.add_argument_group("the answer").add_argument
    add("--think", action=argparse.BooleanOptionalAction,
        help="reason before the answer, or don't (default: the chat template's)")
    add("--think-budget", type=int, metavar="N", help="end the reasoning after N tokens and go on to the answer")
    add("-n", "--max-tokens", type=int, metavar="N",
        help="longest answer (default: until it ends, or the context is full)")
    add("--stop", action="append", metavar="TEXT", default=[], help="end before this text; may be given several times")
    add = parser.add_argument_group("how tokens are chosen").add_argument
    add("--greedy", action="store_true", help="always the most likely token: the same as --temperature 0")
    add("--temperature", type=float, metavar="T", help="0 takes the most likely token, 1 samples as the model predicts")
    add("--top-k", type=int, metavar="K", help="only the K most likely tokens; 0 is off")
    add("--top-p", type=float, metavar="P", help="only the most likely tokens that together reach the probability P")
    add("--min-p", type=float, metavar="P", help="only tokens at least P times as likely as the most likely one")
    add("--repetition-penalty", type=float, metavar="X", help="above 1: tokens in prompt and answer get less likely")
    add("--presence-penalty", type=float, metavar="X", help="above 0: tokens of the answer get less likely")
    add("--frequency-penalty", type=float, metavar="X", help="above 0: the same, once for each time they occur")
    add("--seed", type=int, metavar="N", help="makes sampling repeatable")
    return add_more


def make_parser() -> Parser:
    parser = Parser(description="Answers a prompt with a Qwen3 model. The answer goes to stdout, all else to stderr.",
                    epilog="Defaults come from the model's generation_config.json. At temperature 0, the "
                           "bundled model's default, --top-k, --top-p, --min-p and --seed change nothing.")
    add = parser.add_argument_group("what to ask").add_argument
    add("prompt", nargs="?", help='what to ask; "-", or nothing with something piped in, reads it from stdin')
    add("-p", "--prompt", dest="prompt_option", metavar="TEXT", help="the same as an option")
    add("--file", metavar="FILE", help="read the prompt from a file; with a prompt as well, it follows the prompt")
    add("-s", "--system", metavar="TEXT", help="system prompt")
    add("--system-file", metavar="FILE", help="read the system prompt from a file")
    add("--messages", metavar="FILE", help="a conversation so far: JSON, a list of messages as in OpenAI's API")
    add("--tools", metavar="FILE", help="tools that the model may call: JSON, as in OpenAI's API")
    add("--raw", action="store_true", help="continue the prompt as plain text, without the chat template")
    add = parser.add_argument_group("which model").add_argument
    add("-m", "--model", metavar="NAME", help="a folder with config.json, tokenizer.json and *.safetensors; a GGUF "
        "file; or a model on the Hugging Face hub, such as Qwen/Qwen3-0.6B, 0.6B for short, or a GGUF file there, such "
        "as Qwen/Qwen3-0.6B-GGUF:Q8_0: taken from the hub's cache, or downloaded (default: $QWEN3_MODEL, else the "
        "small bundled model)")
    add("--offline", action="store_true", help="never use the network: only folders and the hub's cache")
    add("--adapter", metavar="DIR", help="a folder with a LoRA adapter for the model, which is merged while loading")
    add("--rope-scaling", choices=["yarn"], help="stretch the context, with --rope-factor: for texts that are longer "
        "than the model was trained for")
    add("--rope-factor", type=float, metavar="X", help="how many times the trained context (Qwen advises 4)")
    add = parser.add_argument_group("what to do").add_argument
    add("--chat", action="store_true", help="a conversation; /help in it lists its commands. On a terminal, also "
        "where there is no prompt")
    add("--continue", action="store_true", help="--chat that goes on with the last conversation not saved")
    add("--score", action="store_true", help="instead of answering, print how likely the model finds the text: its "
        "log-likelihood, tokens and perplexity; with --file of each line")
    add("--list", action="store_true", help="list the bundled model and those in the hub's cache, with --model FOLDER "
        "also those in a folder: their sizes, and whether this program runs them")
    add("--verify", action="store_true", help="compare the model's files with their checksums: of a model in the hub's "
        "cache, or in the fast engine of one that it has quantized")
    add("--version", action="store_true", help="print the version, and the git commit if there is one")
    add = add_answer_options(parser)
    add("--hide-thinking", action="store_true", help="don't show the reasoning")
    add("--lookup", type=int, metavar="N", help="guess up to N tokens from the earlier text, and check them in "
        "one pass: the same answer, sooner where it repeats its prompt")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="print one JSON object: text, reasoning, tool calls, token counts, times")
    add("--logprobs", type=int, metavar="N", help="the logprob of each token and of the N most likely ones (on stderr, "
        "or in the JSON object)")
    add("--stats", action="store_true", help="print speed and memory to stderr")
    add("--prompt-cache", metavar="FILE", help="keep the computed prompt in a file: another prompt that begins alike "
        "starts sooner")
    return parser


# Option -> what does not go with it, and would otherwise be ignored.
EXCLUDES = {
    "raw": ("system", "system_file", "messages", "tools", "think", "hide_thinking", "think_budget", "chat"),
    "chat": ("score", "json", "logprobs", "prompt_cache"),
    "score": ("system", "system_file", "messages", "tools", "think", "hide_thinking", "think_budget", "max_tokens",
              "stop", "lookup", "logprobs", "stats", "prompt_cache", "greedy", *Sampling.__dataclass_fields__, "seed"),
    "continue": ("messages",),
    "greedy": ("temperature",),
    "system": ("system_file",),
}
# Option that answers nothing -> what goes with it: the rest would be ignored.
ALONE = {"list": {"model", "offline", "json"}, "verify": {"model", "offline"}, "compile": set(),
         "save_quantized": {"model", "offline", "adapter", "quantize", "threads"}}


def parse_arguments(parser: Parser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, as far as they can be checked without reading a file; exits with status 2 for bad usage."""
    args = parser.parse_args(argv)
    args.chat = args.chat or getattr(args, "continue")
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    if {"prompt", "prompt_option"} <= given:
        parser.error("there are two prompts, one of them given by -p")
    args.prompt = args.prompt if args.prompt_option is None else args.prompt_option
    for option, others in EXCLUDES.items():
        for other in others:
            if {option, other} <= given:
                parser.error(f"--{option} does not go with {shown(other, args)}")
    if args.version:
        return args
    if jobs := [job for job in ALONE if job in given]:
        if rest := sorted(given - {jobs[0]} - ALONE[jobs[0]]):
            parser.error(f"{shown(jobs[0], args)} does not go with {shown(rest[0], args)}")
        return args
    if not given & {"prompt", "prompt_option", "file", "messages", "chat"}:
        terminal = sys.stdin is None or sys.stdin.isatty()
        if terminal and (sys.stdin is None or given & {"raw", *EXCLUDES["chat"]}):
            parser.error("there is no prompt; give one, or --chat for a conversation")
        args.chat, args.prompt = terminal, None if terminal else "-"
    if [args.prompt, args.file, args.system_file, args.messages, args.tools].count("-") > 1:
        parser.error("only one thing can be read from stdin")
    return args


def shown(name: str, args: argparse.Namespace) -> str:
    """An option in the form in which people type it."""
    if name == "prompt":
        return "a prompt"
    return "--no-think" if name == "think" and not args.think else "--" + name.removesuffix("_option").replace("_", "-")


def checked_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `Completion`. Raises InputError for wrong values, before a large model is loaded."""
    sampling = {name: getattr(args, name) for name in Sampling.__dataclass_fields__}
    if args.greedy:
        sampling["temperature"] = 0.0
    Sampling().updated(**sampling)
    return sampling | {"max_new_tokens": checked_whole("max_tokens", args.max_tokens, 1),
                       "seed": checked_whole("seed", args.seed, 0),
                       "think_budget": checked_whole("think_budget", args.think_budget, 0),
                       "lookup": checked_whole("lookup", args.lookup, 0),
                       "stop": checked_stop(args.stop)}


def read_prompt(args: argparse.Namespace) -> str | None:
    """The text to ask, from the argument, stdin and --file, or None if only --messages or --chat is given."""
    parts = [read_text("-") if args.prompt == "-" else args.prompt, None if args.file is None else read_text(args.file)]
    given = [part for part in parts if part is not None]
    if given and not any(part.strip() for part in given):
        raise InputError("the prompt is empty")
    return "\n\n".join(given) if given else None


def read_conversation(args: argparse.Namespace) -> tuple[list[dict], list[dict] | None]:
    """(messages, tools) of --messages, --tools, --system and the prompt."""
    file = kept_conversation() if getattr(args, "continue") else args.messages
    messages, tools = ([], None) if file is None else read_messages(file)
    tools = tools if args.tools is None else read_tools(args.tools)
    system = args.system if args.system_file is None else read_text(args.system_file)
    if system is not None:
        if any(message["role"] == "system" for message in messages):
            raise InputError(f"{file}: has a system message, so --system can't set another one")
        messages = [{"role": "system", "content": system}, *messages]
    prompt = read_prompt(args)
    if prompt is not None:
        messages = [*messages, {"role": "user", "content": prompt}]
    return messages, tools


# ----------------------------------------------------------------------------------------------------------------------
# What to do
# ----------------------------------------------------------------------------------------------------------------------

def load(args: argparse.Namespace, engine: Engine) -> Model:
    """The model of --model, of $QWEN3_MODEL, or the bundled one."""
    name = named_model(args)
    yarn = args.rope_scaling is not None
    if yarn is (args.rope_factor is None):
        raise InputError("--rope-scaling yarn and --rope-factor X go together")
    if yarn:
        stretched(args.rope_factor, 1)  # checks the factor before a large model is loaded
    model = load_model(BUNDLED if name is None else name, engine, offline=args.offline, adapter=args.adapter)
    if yarn and model.config.yarn is not None:
        raise InputError(f"{model.path}: its files stretch the context already, {model.config.yarn['factor']:g} times; "
                         "leave out --rope-scaling and --rope-factor")
    if yarn:  # the weights are the same
        config = replace(model.config, yarn=stretched(args.rope_factor, model.config.max_position_embeddings))
        model = replace(model, config=config)
    if name is None and sys.stderr is not None and sys.stderr.isatty():  # a person's concern, not a script's
        note("No --model given: the small bundled model answers. For Qwen's own: --model Qwen/Qwen3-0.6B")
    return model


def answer(args: argparse.Namespace, engine: Engine) -> None:
    """Loads the model and answers one prompt."""
    options = checked_options(args) | {"logprobs": checked_whole("logprobs", args.logprobs, 0)}
    prompt = read_prompt(args) or "" if args.raw else ""
    messages, tools = ([], None) if args.raw else read_conversation(args)
    model = load(args, engine)
    cache, saved = open_prompt_cache(args.prompt_cache, model)
    if args.raw:
        completion = Completion(model, model.tokenizer.encode(prompt), cache=cache, **options)
    else:
        completion = chat(model, messages, tools, args.think, cache=cache, **options)
    try:
        if args.json:
            value = as_json(completion.finish(), args.logprobs)
            print_json(value | {"reasoning": None} if args.hide_thinking else value)
        elif args.raw:
            print_raw(completion)
        else:
            print_answer(completion, args.hide_thinking)
    finally:
        if cache is not None and saved == completion.cached_tokens < len(completion.prompt_ids) - 1:
            cache.truncate(min(cache.length, len(completion.prompt_ids)))
            save_prompt_cache(cache, model, args.prompt_cache)
    report(completion, args)


def report(completion: Completion, args: argparse.Namespace) -> None:
    """Prints the notes that follow an answer to stderr."""
    if not args.json and (cut := cut_note(completion)):  # the JSON object has its finish_reason
        note(cut)
    if args.logprobs is not None and not args.json:
        for entry in logprob_objects(completion):
            others = "".join(f"  {other['logprob']:9.4f} {other['token']!r}" for other in entry["top"])
            note(f"{entry['logprob']:9.4f} {entry['token']!r}{' |' if others else ''}{others}")
    if args.stats:
        note(statistics(completion, lookup=bool(args.lookup)))


def open_prompt_cache(name: str | None, model: Model) -> tuple[KVCache | None, int]:
    """(the KV cache in a file, how many positions it holds); an empty cache if there is no such file yet."""
    if name is None:
        return None, 0
    cache = load_prompt_cache(model, name) if os.path.lexists(name) else model.engine.new_cache(model.config)
    return cache, cache.length


def print_scores(args: argparse.Namespace, engine: Engine) -> None:
    """Prints log-likelihood, tokens and perplexity of the prompt, and of each line of --file.

    The first token of a text is given, so a text of n tokens has n - 1 whose probability counts.
    """
    texts = [read_text("-") if args.prompt == "-" else args.prompt] if args.prompt is not None else []
    texts += [] if args.file is None else read_text(args.file).split("\n")
    model = load(args, engine)
    for text in texts:
        ids = model.tokenizer.encode(text)
        n, total = max(len(ids) - 1, 0), float(sum(score(model, ids))) if ids else 0.0
        mean = -total / n if n else math.inf
        value = {"logprob": round(total, 4), "tokens": n,
                 "perplexity": round(math.exp(mean), 4) if mean < 700 else None}  # beyond, it is no float
        if args.json:
            print_json(value | {"text": text})
        else:
            perplexity = "-" if value["perplexity"] is None else f"{value['perplexity']:.4f}"
            write(f"{total:.4f}\t{n}\t{perplexity}\t{text}\n")


def converse(args: argparse.Namespace, engine: Engine) -> int:
    """A conversation on the terminal, or with lines from a pipe -> exit status."""
    if sys.stdin is None:
        raise InputError("stdin is closed, so there is nobody to talk to")
    options = checked_options(args)
    messages, tools = read_conversation(args)
    model = load(args, engine)
    check_answers(model.path, model.embeds)  # before somebody types a question
    return run_chat(Chat(model, messages, tools, args.think, args.hide_thinking, options, args.stats))


def print_version(_args: argparse.Namespace, _engine: Engine) -> None:
    """Prints the version, with the commit of a checkout."""
    name = commit()
    write(f"qwen3 {__version__}{f' ({name})' if name else ''}\n")


def commit() -> str | None:
    """The short name of the git commit in the folder of qwen3.py, or None if that is no checkout of its own."""
    if not (HERE / ".git").exists():  # git would take the commit of a repository further up
        return None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "--git-dir", HERE / ".git", "rev-parse", "--short", "HEAD"], env=environment,
                              stdin=subprocess.DEVNULL, capture_output=True, encoding="ascii", timeout=5)
    except (OSError, ValueError, subprocess.SubprocessError):  # no git; not a commit's name; it hangs
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main(argv: Sequence[str] | None = None, parser: Parser | None = None,
         make_engine: Callable[[argparse.Namespace], Engine] = lambda args: NUMPY,
         jobs: dict[str, Callable[[argparse.Namespace, Engine], None]] | None = None) -> int:
    """The command line -> exit status.

    A faster engine adds options to the parser, and is made from their values; `jobs` are done instead of answering when
    the option of that name is given.
    """
    args = parse_arguments(parser or make_parser(), argv)

    def work() -> int:
        engine = make_engine(args)
        if args.chat:
            return converse(args, engine)
        wanted = {"version": print_version, "list": print_models, "verify": verify_cached, "score": print_scores}
        wanted |= jobs or {}
        name = next((name for name in wanted if getattr(args, name) not in (None, False)), None)
        (answer if name is None else wanted[name])(args, engine)
        return 0

    return guarded(work)


def guarded(work: Callable[[], int]) -> int:
    """Does the work of a command -> its exit status. Bad input and Ctrl-C end in one line on stderr."""
    caught = release_ctrl_c()  # from here on, to stop an answer or an engine's threads in order
    if sys.stderr is None:  # closed; a library may write to it
        sys.stderr = open(os.devnull, "w")
    try:
        if sys.stdout is None:
            raise InputError("stdout is closed, so there is nowhere to write the answer to")
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal that can't show a character gets a question mark
        return work()
    except InputError as error:
        message, status = str(error), 1
    except MemoryError:
        message, status = "not enough memory for this model", 1
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    finally:
        if caught:
            catch_ctrl_c()
    note(f"{program()}: {message}")
    return status


if __name__ == "__main__":
    sys.exit(main())
