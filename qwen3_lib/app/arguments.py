"""Options that several commands have, each defined once: the model, the engine, the answer."""
from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from qwen3 import BUNDLED, Engine, InputError, Model, Sampling, Source, load_model
from qwen3_lib.generation.guesses import Draft, has_mtp_head
from qwen3_lib.generation.options import DRAFTS, OPTION_NAMES, AnswerOptions
from qwen3_lib.generation.prompt_store import PromptStore
from qwen3_lib.generation.schema import lark, regex
from qwen3_lib.app.files import read_json, read_text
from qwen3_lib.io.facts import LARGE, NUMPY, engine_name, parameters
from qwen3_lib.app.terminal import note
from qwen3_lib.io.errors import LONGEST_LINE, brief, did_you_mean, parse_json
from qwen3_lib.io.rope import stretched
from qwen3_vision import MAX_PIXELS


ENGINE_OPTIONS = ("quantize", "threads", "kv_dtype", "activations")  # of the fast engine
SYNONYMS = {"--max-new-tokens": "--max-tokens", "--system-prompt": "--system"}  # as other programs call them


# Options of other programs -> what to tell those who give one here
OF_OTHERS = dict.fromkeys(("--ctx-size", "--max-model-len", "--num-ctx", "-c"),
                          "the context is the model's, and --rope-factor stretches it") | dict.fromkeys(
    ("--port", "--host"), "qwen3_server.py serves") | {
    "--lora": "it is called --adapter", "--dtype": "--quantize packs weights",
    "--cache-type-k": "it is called --kv-dtype", "--hf-repo": "it is called --model"}


class Parser(argparse.ArgumentParser):
    """An argument parser that takes --max_tokens for --max-tokens, and reports errors in one line.

    `hints`: options that people know from other programs, and what to tell those who give one here. No option may be
    shortened: --api-key would stand for --api-key-file, and the key be printed as the name of a file.
    """

    def __init__(self, *, hints: Mapping[str, str] | None = None, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self.hints = {**OF_OTHERS, **(hints or {})}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        args = list(sys.argv[1:] if args is None else args)
        end = args.index("--") if "--" in args else len(args)
        for i, (name, equals, value) in enumerate(arg.partition("=") for arg in args[:end]):
            if name.startswith("--"):
                name = name.replace("_", "-")
                args[i] = SYNONYMS.get(name, name) + equals + value
        intermixed = end == len(args)  # options may stand between the words of a prompt
        found = (self.parse_intermixed_args if intermixed else super().parse_args)(args, namespace)
        if getattr(found, "fast", None) is False:
            self.check(found, {"fast": ENGINE_OPTIONS})
        return found

    def error(self, message: str) -> NoReturn:
        given = [word.partition("=")[0] for word in message.split() if re.match(r"--?\w", word)]
        if message.startswith("unrecognized arguments") and given:
            hint = self.hints.get(given[0])
            known = re.findall(r"--[a-z-]+", self.format_help())
            longer = [name for name in known if name.startswith(given[0])]
            meant = f"; did you mean {longer[0]}?" if longer else did_you_mean(given[0], known)
            message = f"there is no option {given[0]} here{f'; {hint}' if hint else meant}"
        print(f"{self.prog}: error: {brief(message, LONGEST_LINE)} (--help lists the options)", file=sys.stderr)
        self.exit(2)

    def given(self, args: argparse.Namespace) -> set[str]:
        """The names of the options that a user gave."""
        return {name for name, value in vars(args).items() if value not in (None, [], self.get_default(name))}

    def check(self, args: argparse.Namespace, excludes: Mapping[str, Sequence[str]]) -> None:
        """Exits if an option is given together with one that it excludes."""
        for option, others in excludes.items():
            if option in self.given(args) and (wrong := [other for other in others if other in self.given(args)]):
                self.error(f"{shown(option, args)} does not go with {shown(wrong[0], args)}")


def shown(name: str, args: argparse.Namespace) -> str:
    """An option as people type it."""
    return ("--no-" if getattr(args, name) is False else "--") + name.replace("_", "-")


def add_model_options(parser: argparse.ArgumentParser, default: str = "the small bundled model") -> None:
    add = parser.add_argument_group("which model").add_argument
    add("-m", "--model", metavar="NAME", help="a folder with config.json, tokenizer.json and *.safetensors; a GGUF "
        "file; or a model on the Hugging Face hub: Qwen/Qwen3-0.6B, or 0.6B for short, or a GGUF file there: "
        "Qwen/Qwen3-0.6B-GGUF:Q8_0. A model on the hub is downloaded once (default: $QWEN3_MODEL, otherwise "
        f"{default})")
    add("--offline", action="store_true", help="never use the network: only folders and downloaded models")
    add("--adapter", action="append", metavar="DIR", help="a folder with a LoRA adapter, which is merged into the "
        "model while loading")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the fast engine").add_argument
    add("--fast", action=argparse.BooleanOptionalAction, help="compute with the fast engine, which needs numba, or "
        "with NumPy (default: the fast engine if numba is installed and the model has more than 100 million weights); "
        "each option below implies --fast")
    add("--quantize", choices=["int8", "int4"], help="pack each weight into 8 or 4 bits: up to 2 or 3 times as fast "
        "as bfloat16")
    add("--threads", type=int, metavar="N", help="number of threads (default: one for each CPU this process may use)")
    add("--kv-dtype", choices=["f16", "bf16", "f32", "int8"], help="number format of the KV cache (default: bf16 where "
        "keys and values are rounded to bf16, see --activations; else f16)")
    add("--activations", choices=["f32", "bf16"], help="bf16: round vectors to bf16 before they are multiplied with "
        "weights, keys or values of bf16, which CPUs with AVX512_BF16 do faster; f32: round none, and keep keys and "
        "values in f16 unless told otherwise (default: bf16, but f32 for keys and values of models in float16 or "
        "float32)")


def add_option(add: Callable[..., Any], name: str, *flags: str, default: str = "") -> None:
    """Adds an option of options.py that is a number; `default` for its help."""
    about = AnswerOptions.__dataclass_fields__[name]
    kind = float if "float" in str(about.type) else int
    add(*(flags or [f"--{name.replace('_', '-')}"]), type=kind, metavar=about.metadata["metavar"],
        help=about.metadata["help"] + (default and f" (default: {default})"))


def add_draft(add: Callable[..., Any], models: bool = False) -> None:
    """Adds --draft; `models`: whether the command can load a second model."""
    about = AnswerOptions.__dataclass_fields__["draft"].metadata
    text = about["help"]
    text = f"{text}, or with int4, its own weights in 4 bits" if models else text.partition("; or ")[0]
    add("--draft", metavar=about["metavar"], choices=None if models else DRAFTS, help=text)


UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
ON_DISK = "20GB"


def checked_size(name: str, text: str | None) -> int | None:
    """The bytes in "4GB", "500 MB" or "2GiB", given for the option `name`; None for None. Raises InputError."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmg]i?b|)", text.strip().lower())
    if found is None:
        raise InputError(f"{name} must be a size such as 4GB or 500MB, not {brief(repr(text))}")
    return int(float(found[1]) * UNITS[found[2]])


def add_keep_on_disk(add: Callable[..., Any]) -> None:
    add("--keep-on-disk", metavar="DIR", help="keep what was computed of prompts and answers in files of this folder, "
        "so that a conversation that goes on isn't computed again after a restart; DIR:SIZE takes at most SIZE "
        f"(default: {ON_DISK})")


def prompt_store(args: argparse.Namespace, model: Model) -> PromptStore | None:
    """That of --keep-on-disk. Raises InputError for a folder that can't be written, or a size that can't be read."""
    if (given := args.keep_on_disk) is None:
        return None
    folder, colon, size = given.rpartition(":")
    if not colon or re.search(r"[/\\]", size):  # the colon of C:\kept
        folder, size = given, ON_DISK
    if not folder:
        raise InputError("--keep-on-disk needs the name of a folder")
    return PromptStore(model, os.path.expanduser(folder), checked_size("the size of --keep-on-disk", size) or 0)


def add_sampling(add: Callable[..., Any]) -> None:
    for name in (*Sampling.__dataclass_fields__, "seed"):
        add_option(add, name)


def add_max_pixels(add: Callable[..., Any], default: str = f"{MAX_PIXELS:,}") -> None:
    add_option(add, "max_pixels", default=default)


def add_answer_options(parser: argparse.ArgumentParser) -> Any:
    """Adds the options of an answer and of sampling -> a function that adds more to the first group."""
    add = add_more = parser.add_argument_group("the answer").add_argument
    add("--think", action=argparse.BooleanOptionalAction,
        help="reason before the answer, or don't (default: the chat template decides)")
    add("--chat-template-kwargs", metavar="JSON",
        help="variables of the chat template: '{\"preserve_thinking\": true}'")
    add_option(add, "think_budget")
    add("--stop-loops", action=argparse.BooleanOptionalAction,
        help=AnswerOptions.__dataclass_fields__["stop_loops"].metadata["help"] + " (default: in a chat)")
    add_option(add, "max_new_tokens", "-n", "--max-tokens")
    add("--stop", action="append", metavar="TEXT", default=[], help="end the answer before this text; may be repeated")
    add("--json-schema", metavar="FILE", help="the answer is JSON that fits the JSON Schema in this file")
    add("--regex", metavar="PATTERN", help="the answer matches this regular expression as a whole")
    add("--grammar", metavar="FILE", help="the answer is one that the Lark grammar in this file generates")
    add_option(add, "max_string")
    add = parser.add_argument_group("sampling").add_argument
    add("--greedy", action="store_true", help="always take the most likely token, as --temperature 0 does")
    add_sampling(add)
    return add_more


def answer_options(args: argparse.Namespace) -> AnswerOptions:
    """The options of an answer, but for a model as its draft, see load_draft. Raises InputError before a large model is
    loaded."""
    there = vars(args)
    given = {name: there.get(name) for name in OPTION_NAMES if name != "draft" or there.get(name) in DRAFTS}
    given |= {"max_new_tokens": there.get("max_tokens"), "schema": schema_option(there)}
    if there.get("greedy"):
        given["temperature"] = 0.0
    try:
        return AnswerOptions(**given)
    except InputError as error:
        name, _, rest = str(error).partition(" ")
        flag = "max_tokens" if name == "max_new_tokens" else name
        raise InputError(f"--{flag.replace('_', '-')} {rest}" if flag in there else str(error)) from error


def template_option(args: argparse.Namespace) -> Any:
    """The variables of the chat template."""
    given = args.chat_template_kwargs
    return None if given is None else parse_json(given, "--chat-template-kwargs")


def schema_option(given: dict[str, Any]) -> Any:
    """What the answer must fit: see the schema of a Completion. None if anything will do."""
    file, pattern, grammar = (given.get(name) for name in ("json_schema", "regex", "grammar"))
    if file is None:
        return regex(pattern) if pattern is not None else None if grammar is None else lark(read_text(grammar))
    schema = read_json(file)
    if not isinstance(schema, dict):
        raise InputError(f"{file}: a JSON Schema is an object, {{\"type\": ...}}")
    return schema


def engine_of(args: argparse.Namespace, source: Source) -> Engine:
    """The engine of add_engine_options for a model. Raises InputError where numba is asked for and absent."""
    asked = args.fast or source.saved is not None or any(vars(args)[name] is not None for name in ENGINE_OPTIONS)
    if args.fast is False or not asked and (parameters(source) <= LARGE or not source.kind.fast):
        return Engine()
    try:
        import qwen3_numba
    except ImportError as error:  # numba is an extra that a plain installation leaves out
        if not asked:
            return Engine()
        raise InputError(str(error)) from error
    return qwen3_numba.engine(args.quantize, args.threads, args.kv_dtype, args.activations)(source)


def load_draft(args: argparse.Namespace, model: Model) -> Draft | str | None:
    """What --draft names: a draft by a model, or by the model's own weights in fewer bits; else one of DRAFTS."""
    if args.draft in (None, *DRAFTS):
        return args.draft
    form = args.draft if args.draft in ("int4", "int8") else None
    fast = engine_name(model) != NUMPY
    if form and (not fast or args.quantize == "int4" or args.quantize == form):
        raise InputError(f"--draft {form} needs the fast engine (--fast), and a model with more bits for a weight")
    same = argparse.Namespace(**vars(args) | {"quantize": form or args.quantize, "fast": fast})
    other = same if form else argparse.Namespace(**vars(same) | {"model": args.draft, "adapter": None})
    return Draft(load_main(other), model)


def named_model(args: argparse.Namespace) -> str | None:
    """The name of the model that --model or $QWEN3_MODEL gives, or None."""
    return args.model if args.model is not None else os.environ.get("QWEN3_MODEL") or None


def load_main(args: argparse.Namespace, engine: Engine | None = None) -> Model:
    """The model of --model, of $QWEN3_MODEL, or the bundled one, with the engine of the options."""
    factor, name = getattr(args, "rope_factor", None), named_model(args)
    if factor is not None and not 1 <= factor <= 1e6:
        raise InputError(f"--rope-factor must be a number between 1 and 1e+06, not {factor}")
    try:
        model = load_model(BUNDLED if name is None else name, engine or partial(engine_of, args), args.offline,
                           adapter=args.adapter)
    except InputError as error:
        raise InputError(f"$QWEN3_MODEL: {error}" if name is not None and args.model is None else str(error)) from error
    if getattr(args, "draft", None) == "auto" and not has_mtp_head(model):
        note("--draft auto has no effect: this model has no MTP head")
    return model if factor is None else replace(model, config=stretched(model.config, factor))
