"""adapter_config.json of a LoRA adapter: which modules peft changes, by what names, and how much."""
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qwen3_lib.io.errors import InputError, brief, read_json_object, some

CONFIG = "adapter_config.json"
# Keys of adapter_config.json that are of training alone, or say what the tensors' names say, too.
HARMLESS = {"auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "fan_in_fan_out",
            "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core", "peft_version",
            "qalora_group_size", "revision", "runtime_config", "task_type", "velora_config"}
NUMBERS = {"r": 8, "lora_alpha": 8}
TYPES = {"rank_pattern": dict, "alpha_pattern": dict, "layers_to_transform": int | list, "layers_pattern": str | list,
         "exclude_modules": str | list, "target_modules": str | list, "target_parameters": list,
         "modules_to_save": list}
FLAGS = (None, False, True)
# Other beginnings than these (PiSSA, OLoRA, LoftQ, CorDA, ...) change the base model, too.
ONLY = {"peft_type": ("LORA",), "use_rslora": FLAGS, "use_dora": FLAGS, "lora_bias": FLAGS,
        "ensure_weight_tying": FLAGS, "init_lora_weights": (*FLAGS, "gaussian", "orthogonal", "eva")}
FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # all experts in one tensor
Settings = dict[str, Any]


def read_settings(file: Path) -> Settings:
    """The object in adapter_config.json. Raises InputError for what changes the computation and isn't known here."""
    settings = NUMBERS | read_json_object(file)
    for key, values in ONLY.items():
        if settings.get(key) not in values:
            raise InputError(f"{file}: {key} = {brief(repr(settings.get(key)))} is not supported, only "
                             f"{some(map(repr, values))} is")
    for key, value in settings.items():
        known = key in {*HARMLESS, *ONLY, *NUMBERS, *TYPES} or value in (None, False, "none", [], {})
        if not known or value is not None and not isinstance(value, TYPES.get(key, object)):
            raise InputError(f"{file}: option {brief(key)} = {brief(value, 80)} is not supported by this program")
    return settings


def full_name(name: str) -> str:
    """The name of a module or a tensor in a language model.

    An embedding model's lacks `model.`; beside a vision tower it begins with `model.language_model.`
    """
    name = name.replace("model.language_model.", "model.", 1)
    return f"model.{name}" if name.split(".")[0] in ("layers", "embed_tokens", "norm") else name


def matched(pattern: Any, name: str) -> re.Match[str] | None:
    """re.fullmatch. Raises InputError for a pattern that is no regular expression."""
    try:
        return re.fullmatch(pattern, name)
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(f"{CONFIG}: {brief(pattern)} is no regular expression: {error}") from error


def listed(settings: Settings, key: str) -> list[Any]:
    """The list under a key; one value stands for a list of it."""
    value = settings.get(key)
    return value if isinstance(value, list) else [] if value is None else [value]


def ends(name: str, wanted: Iterable[Any]) -> bool:
    """Whether the name is one of those wanted, or ends with a dot and one of them."""
    return any(f".{name}".endswith(f".{one}") for one in wanted)


def is_target(module: str, settings: Settings) -> bool:
    """Whether peft changes this module by LoRA: check_target_module_exists in its tuners_utils.py."""
    wanted, layers = settings.get("target_modules"), listed(settings, "layers_to_transform")
    excluded = settings.get("exclude_modules")
    if module == "lm_head" and settings.get("ensure_weight_tying"):
        return is_target("model.embed_tokens", settings)
    if matched(excluded, module) if isinstance(excluded, str) else ends(module, listed(settings, "exclude_modules")):
        return False
    if any(matched(rf"(.*\.)?({name})(\..*)?", module) for name in listed(settings, "modules_to_save")):
        return False
    if wanted is None:  # peft's own choice for a Qwen3
        return settings.get("target_parameters") is None and ends(module, ("q_proj", "v_proj"))
    if isinstance(wanted, str):
        return not ends(module, ("lm_head", "embed_tokens")) if wanted.lower() == "all-linear" else \
            matched(wanted, module) is not None
    if not layers or module in wanted or not ends(module, wanted):
        return ends(module, wanted)
    places = [rf"(?:.*?\.)?{pattern}" for pattern in listed(settings, "layers_pattern")] or [r".*?\.[^.]*"]
    found = next(filter(None, (matched(rf"{place}\.(?P<layer>\d{{1,9}})\..*", module) for place in places)), None)
    return found is not None and int(found["layer"]) in layers


def key_of(module: str, settings: Settings) -> str | None:
    """The name by which adapter_config.json speaks of a module with lora_A: its own, or that of its parameter.

    None if the file doesn't name it: then peft ignores its tensors. Of two parameters of one module (FUSED), peft wraps
    the second one outside: `experts.lora_A` is of down_proj, `experts.base_layer.lora_A` of gate_up_proj.
    """
    bare, depth = module.replace(".base_layer", ""), module.count(".base_layer")
    fused = bare.endswith(".experts")
    if not fused and is_target(module, settings):
        return module
    parameters = [f"{bare}.{name}" for name in (FUSED if fused else ("weight",))]
    wrapped = [key for key in parameters if ends(key, listed(settings, "target_parameters"))]
    return wrapped[-1 - depth] if depth < len(wrapped) else None


def number_of(settings: Settings, option: str, patterns: str, key: str) -> Any:
    """An option, with the exception for this key, where there is one."""
    return next((value for pattern, value in (settings.get(patterns) or {}).items()
                 if matched(rf"(.*\.)?({pattern})", key)), settings[option])
