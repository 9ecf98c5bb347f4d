"""Models by name: a folder, or a model of the Hugging Face hub, which is downloaded once and then taken from the cache.

    resolve_model("Qwen3-0.6B")         a folder, as it is
    resolve_model("Qwen/Qwen3-0.6B")    a model of the hub: owner/name
    resolve_model("0.6B")               the same, for short

The hub's own client, huggingface_hub, finds the cache, downloads and draws the progress bars. It reads its settings
(HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, ...) from the environment when it is imported, and that
takes time: so it is imported only for a name that is not a folder, and handed on as `hub`.
"""
import contextlib
import errno
import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from qwen3_io.errors import InputError, brief, read_json, read_json_object

SHORT_NAMES = {size: f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")}

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights in several files, the shards
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
AGAIN = "run the same command again, files that are complete are kept"
SAFE_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._+=-]{1,128}", re.ASCII)  # stays in its folder, whatever the file system


def resolve_model(name: str, offline: bool = False) -> Path:
    """The folder with a model's files, for what a user calls a model: a folder, owner/name on the hub, or a size.

    A folder comes first, then the hub's cache; only what isn't completely there is downloaded, and when `offline` or
    HF_HUB_OFFLINE=1, nothing is. Raises InputError for what can't be a model's name, and when a download fails.
    """
    folder = os.path.expanduser(name) if name == "~" or name.startswith("~/") else name
    if os.path.isdir(folder):
        return Path(folder)
    if os.path.exists(folder):
        raise InputError(f"{brief(name)}: not a folder; a model is a folder with {CONFIG}, {TOKENIZER} and {WEIGHTS}")
    hub = import_client(name)
    repo_id = hub_id(hub, name)
    cached = cached_folder(hub, repo_id)
    if cached is None and (offline or hub.is_offline_mode()):
        raise InputError(f"{repo_id}: no such folder, not (or not completely) in the hub's cache "
                         f"{hub.constants.HF_HUB_CACHE} either, and offline; once online, run the command again, or: "
                         f"hf download {repo_id}")
    return cached or download(hub, repo_id)


def import_client(name: str) -> ModuleType:
    """huggingface_hub. Raises InputError where it isn't installed or can't make sense of its environment variables."""
    try:
        import huggingface_hub.file_download  # reads all the settings, which a lazy huggingface_hub puts off
    except (ImportError, ValueError) as error:
        raise InputError(f"{brief(name)}: no such folder, and huggingface_hub, which asks the hub, can't be imported: "
                         f"{brief(error)}; install it, or correct the HF_... environment variables") from error
    return huggingface_hub


def hub_id(hub: ModuleType, name: str) -> str:
    """The model's owner/name on the hub. Raises InputError for anything that is neither a short name nor a valid id."""
    if name.upper() in SHORT_NAMES:
        return SHORT_NAMES[name.upper()]
    with contextlib.suppress(hub.errors.HFValidationError):
        hub.utils.validate_repo_id(name)
        if "/" in name:
            return name
    raise InputError(f"{brief(name)}: no such folder, and no model of the hub: those are called owner/name, like "
                     f"Qwen/Qwen3-0.6B, or for short {', '.join(SHORT_NAMES)}")


def cached_folder(hub: ModuleType, repo_id: str) -> Path | None:
    """The model's folder in the hub's cache, or None if a file that is needed isn't there. Doesn't ask the hub."""
    with client_errors(hub, repo_id):
        config = hub.try_to_load_from_cache(repo_id, CONFIG)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    weights = [WEIGHTS] if os.path.exists(folder / WEIGHTS) else shards(folder)
    return folder if weights and all(os.path.isfile(folder / file) for file in (TOKENIZER, *weights)) else None


def shards(folder: Path) -> list[str]:
    """The weight files that a folder's index lists; none where there is no index, or a damaged one."""
    try:
        return sorted(set(map(str, read_json(folder / INDEX)["weight_map"].values())))
    except (InputError, LookupError, TypeError, AttributeError):
        return []


def download(hub: ModuleType, repo_id: str) -> Path:
    """Downloads what is needed of a model, and isn't there yet, into the hub's cache -> the model's folder there.

    The weights come last: a cache that has them all has the optional files too. snapshot_download would do everything
    in one call, but Ctrl-C doesn't stop it, and it waits without end for a hub that doesn't answer.
    """
    hub.set_client_factory(lambda: http_client(hub))
    files = listed_files(hub, repo_id)

    def fetch(file: str, revision: str) -> Path:
        with client_errors(hub, repo_id):
            return Path(hub.hf_hub_download(repo_id, file, revision=revision))

    folder = fetch(CONFIG, "main").parent
    commit = folder.name  # all others from the same one, even if a new one is published meanwhile
    for file in (TOKENIZER, *OPTIONAL, INDEX):
        if file in files:
            fetch(file, commit)
    weights = [WEIGHTS] if WEIGHTS in files else shards(folder)
    if not weights or not files.issuperset(weights):
        wrong = f"{brief(min(set(weights) - files))}, which the hub doesn't have" if weights else "no files"
        raise InputError(f"{repo_id}: {INDEX} lists {wrong}; delete {folder.parents[1]} and try again, or choose "
                         "another model")
    for file in weights:
        fetch(file, commit)
    return folder


def http_client(hub: ModuleType) -> Any:
    """The client's HTTP client, with a time limit for requests that have none, and wary of what becomes a file name."""
    from huggingface_hub.utils._http import default_client_factory

    def refuse_paths(response: Any) -> None:
        for name in ("ETag", "X-Linked-Etag", "X-Repo-Commit"):
            value = response.headers.get(name, "").removeprefix("W/")
            if response.request.method == "HEAD" and ("/" in value or "\\" in value):
                raise ValueError(f"the header {name}: {value} would write outside of the cache")

    client = default_client_factory()
    client.timeout = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    client.event_hooks["response"].append(refuse_paths)
    return client


def listed_files(hub: ModuleType, repo_id: str) -> set[str]:
    """The names of a model's files on the hub, without sub-folders. Raises InputError if one that is needed lacks."""
    with client_errors(hub, repo_id):
        info = hub.HfApi().model_info(repo_id, timeout=hub.constants.HF_HUB_DOWNLOAD_TIMEOUT)
        files = {file.rfilename for file in info.siblings or [] if not {"/", "\\"} & set(file.rfilename)}
    lacking = [file for file in (CONFIG, TOKENIZER) if file not in files]
    if not files & {WEIGHTS, INDEX}:
        lacking.append(f"{WEIGHTS} or {INDEX}")
    if lacking:
        raise InputError(f"{repo_id}: has no {', no '.join(lacking)} on the hub; choose a model with these files")
    return files


@contextlib.contextmanager
def client_errors(hub: ModuleType, repo_id: str) -> Iterator[None]:
    """Turns what the client raises into an InputError and keeps its log off stderr. For blocks that just call it."""
    log = logging.getLogger(hub.__name__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # else it reports each of its attempts
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:  # its own, of the libraries below it, or whatever a malformed answer leads to
        raise InputError(f"{repo_id}: {explanation(hub, error, repo_id)}") from error
    finally:
        log.setLevel(level)


def explanation(hub: ModuleType, error: BaseException, repo_id: str) -> str:
    """What an error of the client means, and what to do."""
    endpoint, cache, httpx = hub.constants.ENDPOINT, hub.constants.HF_HUB_CACHE, hub.utils.httpx
    if isinstance(error, hub.errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # why the hub could not be asked
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return f"the disk of the hub's cache {cache} is full; make room, or set HF_HOME to a folder on another disk"
    said = brief(str(error).strip().partition("\n")[0] or type(error).__name__)  # advice for programmers follows
    match error:
        case hub.errors.GatedRepoError():
            return f"accept its conditions on {endpoint}/{repo_id}, then set HF_TOKEN to a token of your account there"
        case hub.errors.HfHubHTTPError(response=httpx.Response(status_code=401 | 404)):
            return (f"no such folder, and {endpoint} has no such model or doesn't show it to everybody; check the "
                    "name, or set HF_TOKEN to a token of an account that may see it")
        case hub.errors.HfHubHTTPError():
            return f"{endpoint} answered: {said}; try again later"
        case httpx.TimeoutException():
            return f"{endpoint} takes too long to answer; check the network, then {AGAIN}"
        case httpx.HTTPError() | httpx.InvalidURL():
            return f"no connection to {endpoint}: {said}; check the network (and HF_ENDPOINT), then {AGAIN}"
        case OSError(filename=str() | Path()):
            return f"the hub's cache {cache} can't be used: {said}; repair it, or set HF_HOME to another folder"
        case UnicodeEncodeError():
            return f"HF_TOKEN can't be sent: {said}; copy the token again"
        case hub.errors.FileMetadataError() | ValueError() | LookupError() | TypeError() | AttributeError():
            return (f"{endpoint} doesn't answer as the hub does ({type(error).__name__}: {said}); check HF_ENDPOINT, "
                    "and whether the network wants a login")
    return f"the download failed: {said}; {AGAIN}"  # a file of the wrong size; what hf_xet raises


# ----------------------------------------------------------------------------------------------------------------------
# The hub's cache: models--owner--name/ with refs/main, which names a commit, snapshots/<commit>/ with links, and blobs/
# ----------------------------------------------------------------------------------------------------------------------

def cached_models() -> list[tuple[str, Path]]:
    """(owner/name, folder) of the models in the hub's cache that are called Qwen or whose config.json says so, sorted.

    Complete or not, supported or not. Needs neither the hub nor its client.
    """
    found = []
    for home in hub_cache().glob("models--*--*"):
        folder, name = main_snapshot(home), home.name.removeprefix("models--").replace("--", "/")
        if folder and ("qwen" in name.lower() or model_type(folder).startswith("qwen")):
            found.append((name, folder))
    return sorted(found)


def hub_cache() -> Path:
    """The folder of the hub's cache, by the same rules as in the hub's client, whose import takes time."""
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    cache = os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return Path(os.path.expandvars(os.path.expanduser(os.environ.get("HF_HUB_CACHE", cache))))


def main_snapshot(home: Path) -> Path | None:
    """The folder with the files of the newest commit that was asked for, in a model's folder of the hub's cache."""
    ref = home / "refs" / "main"
    if not os.path.isfile(ref):
        return None
    try:
        with open(ref, "rb") as opened:
            commit = opened.read(1000).decode()
    except (OSError, UnicodeDecodeError):
        return None
    folder = home / "snapshots" / commit
    return folder if SAFE_NAME.fullmatch(commit) and os.path.isdir(folder) else None


def model_type(folder: Path) -> str:
    """model_type of a folder's config.json, or an empty text."""
    try:
        return str(read_json_object(folder / CONFIG).get("model_type")) if os.path.isfile(folder / CONFIG) else ""
    except InputError:
        return ""
