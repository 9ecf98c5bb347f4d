"""Models by name: a folder, or a model of the Hugging Face hub, which is downloaded once and then taken from the cache.

    resolve_model("models/mine")                a folder, unchanged; a GGUF file, too
    resolve_model("Qwen/Qwen3-0.6B")            a model of the hub; for short "Qwen3-0.6B" or "0.6B"
    resolve_model("Qwen/Qwen3-8B-GGUF:Q4_K_M")  a GGUF file of the hub: owner/name:QUANTIZATION
    cached_models()                             the models in the hub's cache

The hub's client, huggingface_hub, downloads and shows the progress. Only a download imports it: that takes time.
"""
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from qwen3 import log
from qwen3_lib.io.errors import InputError, brief, read_json_object, some
from qwen3_lib.io.gguf_file import gguf_json
from qwen3_lib.io.gguf_head import is_gguf, part_names
from qwen3_lib.io.pooling import VECTOR_FILES, module_files

SHORT_NAMES = {size: f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")}
CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
INDEX = "model.safetensors.index.json"  # lists the shards, the files of weights in several files
MTP_FILE = "model-mtp.safetensors"  # an MTP head beside an MLX model, whose index needn't name it
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja", *VECTOR_FILES)
MERGED = ("vocab.json", "merges.txt")  # in place of TOKENIZER in the first folders of Qwen3-ASR
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*"  # of a file, never of a path


def resolve_model(name: str, offline: bool = False) -> Path:
    """The folder with a model's files, or its GGUF file. `name` is one of these, owner/name on the hub, or a size.

    A folder comes first, then the hub's cache; only missing files are downloaded, and none if `offline` or
    HF_HUB_OFFLINE=1. A model's folder in the hub's cache (models--owner--name) stands for its main snapshot.
    Raises InputError for what can't be a model's name, and when a download fails.
    """
    path = os.path.expanduser(name) if name.startswith("~/") else name
    if os.path.isdir(path):
        return model_in(Path(path))
    if os.path.exists(path):
        if is_gguf(Path(path)):
            return Path(path)
        raise InputError(f"{brief(name)}: this is not a model folder: it is a file, and not a GGUF file")
    if re.match(r"[./~\\]|[A-Za-z]:[/\\]|[^:]*(\.gguf|\.safetensors|[/\\])$", name, re.IGNORECASE):  # never on the hub
        raise InputError(f"{brief(name)}: there is no such file or folder")
    repo_id, quantization = hub_id(name)
    home = hub_cache() / f"models--{repo_id.replace('/', '--')}"
    if (folder := main_snapshot(home)) is not None:
        needed = (CONFIG, *tokenizer_files(os.listdir(folder)), *(weight_files(folder) or [WEIGHTS]))
        if not quantization and all(os.path.isfile(folder / file) for file in needed):
            return folder
        if file := named_gguf(gguf_names(files_in(folder)), quantization):
            if all(os.path.isfile(folder / part) for part in part_names(file)):
                return folder / file
    hub = None if offline else import_client(repo_id)
    if hub is None or hub.is_offline_mode():
        raise InputError(f"{brief(name)}: there is no such folder; the hub's cache {hub_cache()} lacks files of "
                         f"{repo_id}, and offline nothing is downloaded")
    start = time.monotonic()
    log.info("downloading %s", repo_id)
    try:
        found = download(hub, repo_id, quantization)
        log.info("downloaded %s to %s in %.1f s", repo_id, found, time.monotonic() - start)
        return found
    except InputError:
        raise
    except (OSError, ValueError, hub.utils.httpx.HTTPError, hub.utils.httpx.InvalidURL) as error:
        raise InputError(f"{repo_id}: {why(hub, error, repo_id)}") from error


def model_in(folder: Path) -> Path:
    """The folder itself, its main snapshot if it is of the hub's cache, or the only GGUF file in it."""
    if os.path.lexists(folder / CONFIG):
        return folder
    folder = main_snapshot(folder) or folder
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from error
    found = [name for name in names if is_gguf(folder / name) and "mmproj" not in name]
    ggufs = list({part_names(name)[0]: name for name in reversed(found)}.values())  # the first part there is
    if CONFIG not in names and len(ggufs) != 1:
        raise InputError(f"{folder}: this is not a model folder: it has no {CONFIG}, but {some(names) or 'no files'}")
    return folder if CONFIG in names else folder / ggufs[0]


def hub_id(name: str) -> tuple[str, str]:
    """(the model's owner/name on the hub, the quantization at the end of the name, or an empty text)."""
    model, colon, quantization = name.partition(":")
    repo_id = SHORT_NAMES.get(model.upper(), f"Qwen/{model}" if re.fullmatch("Qwen3-[^/]+", model) else model)
    if re.fullmatch(rf"{NAME}/{NAME}(?<!\.gguf)(:{NAME})?", f"{repo_id}{colon}{quantization}"):
        return repo_id, quantization
    raise InputError(f"{brief(name)}: there is no such folder or file; a model of the hub is called owner/name, like "
                     f"Qwen/Qwen3-0.6B, or for short {', '.join(SHORT_NAMES)}; a GGUF file of the hub is called "
                     "owner/name:QUANTIZATION, like Qwen/Qwen3-0.6B-GGUF:Q8_0")


def gguf_names(files: Iterable[str]) -> dict[str, str]:
    """How a user names the GGUF files among a model's files -> the file, of several parts the first one.

    Q4_K_M for Qwen3-8B-Q4_K_M.gguf and Q4_K_M/Qwen3-8B-Q4_K_M-00001-of-00002.gguf, UD-Q4_K_XL for
    Qwen3-8B-UD-Q4_K_XL.gguf; both stems for two of one quantization.
    """
    ends = {file: end[1] for file in sorted(files) if re.fullmatch(rf"({NAME}/)?{NAME}", file)
            and "mmproj" not in file and part_names(file)[0] == file
            and (end := re.search(r"((?:\bUD-)?[^-./]*-?)(-\d{5}-of-\d{5})?\.gguf$", file, re.IGNORECASE))}
    counts = Counter(ends.values())
    return {end if counts[end] == 1 else Path(file).stem: file for file, end in ends.items()}


def named_gguf(ggufs: dict[str, str], quantization: str) -> str | None:
    """The file of a quantization, in any case; the only file for an empty text; or None."""
    found = [file for name, file in ggufs.items() if quantization.lower() in ("", name.lower())]
    return found[0] if len(found) == 1 else None


def tower_name(files: Iterable[str]) -> str | None:
    """The file with a GGUF model's vision tower, or None; of several, one with 16 bits a weight, then a smaller one."""
    found = [file for file in sorted(files) if re.fullmatch(NAME, file) and re.search(r"mmproj.*\.gguf$", file)]
    return min(found, key=lambda file: ("f16" not in file.lower(), "f32" in file.lower()), default=None)


# ---- The hub's cache -------------------------------------------------------------------------------------------------
# models--owner--name/ has refs/main, which names a commit, snapshots/<commit>/ with links, and blobs/ with the files.

def hub_cache() -> Path:
    """The folder of the hub's cache, by the same rules as in the hub's client."""
    home = os.environ.get("HF_HOME", os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface"))
    cache = os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return Path(os.path.expandvars(os.path.expanduser(os.environ.get("HF_HUB_CACHE", cache))))


def main_snapshot(home: Path) -> Path | None:
    """The folder with the files of the newest commit that was asked for, in a model's folder of the hub's cache."""
    try:
        commit = (home / "refs/main").read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    folder = home / "snapshots" / commit
    return folder if re.fullmatch(NAME, commit) and os.path.isdir(folder) else None


def weight_files(folder: Path) -> list[str]:
    """The files of weights that a folder must have; none where there is no sound index of shards either."""
    if os.path.exists(folder / WEIGHTS) or not os.path.exists(folder / INDEX):
        return whole_weights(os.listdir(folder))
    try:
        return sorted(set(map(str, read_json_object(folder / INDEX)["weight_map"].values())))
    except (InputError, LookupError, TypeError, AttributeError):
        return []


def tokenizer_files(files: Iterable[str]) -> tuple[str, ...]:
    """The files that a tokenizer is read from: TOKENIZER, unless there are only those of MERGED."""
    return MERGED if TOKENIZER not in files and {*MERGED} <= {*files} else (TOKENIZER,)


def whole_weights(files: Iterable[str]) -> list[str]:
    """The file with all weights: WEIGHTS, or the only safetensors file, which may have any name; or none."""
    found = [file for file in files if re.fullmatch(rf"{NAME}\.safetensors", file)]
    return [WEIGHTS] if WEIGHTS in found else found if len(found) == 1 else []


def cached_models() -> list[tuple[str, Path]]:
    """(owner/name, folder) of the models in the hub's cache that are called Qwen or whose config.json says so, sorted.

    A GGUF file has a row for itself: (owner/name:QUANTIZATION, file). Complete or not, supported or not.
    """
    found = []
    for home in hub_cache().glob("models--*--*"):
        if (folder := main_snapshot(home)) is not None:
            name, ggufs = home.name.removeprefix("models--").replace("--", "/"), gguf_names(files_in(folder))
            models = {f"{name}:{each}": folder / file for each, file in ggufs.items()}
            models |= {name: folder} if not ggufs or weight_files(folder) else {}
            found += [(each, path) for each, path in models.items() if "qwen" in f"{each}/{model_type(path)}".lower()]
    return sorted(found)


def files_in(folder: Path) -> list[str]:
    """The files of a folder, and the GGUF files one folder deeper, where many publish those in parts."""
    return [path.relative_to(folder).as_posix() for path in (*folder.glob("*"), *folder.glob("*/*.gguf"))]


def model_type(path: Path) -> str:
    """model_type of a folder's config.json, or of a GGUF file; or an empty text."""
    try:
        return str((gguf_json(path, CONFIG) if is_gguf(path) else read_json_object(path / CONFIG)).get("model_type"))
    except InputError:
        return ""


# ---- Downloading -----------------------------------------------------------------------------------------------------

def import_client(repo_id: str) -> ModuleType:
    """huggingface_hub, which reads its settings from the environment when it is imported."""
    os.environ.setdefault("HF_HUB_DISABLE_XET", "1")  # plain HTTP: Ctrl-C ends it at once
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # else it reports each of its attempts
    try:
        import huggingface_hub.file_download
    except (ImportError, ValueError) as error:
        raise InputError(f"{repo_id}: no such folder, and huggingface_hub can't be imported: {brief(error)}") from error
    return huggingface_hub


def download(hub: ModuleType, repo_id: str, quantization: str) -> Path:
    """Downloads the missing files of a model into the hub's cache -> the model's folder there, or its GGUF file.

    The GGUF file of a vision tower is downloaded, too, if there is one.

    File by file, because Ctrl-C doesn't stop snapshot_download. The weights come last: a cache with all of them has the
    optional files, too.
    """
    info = hub.HfApi().model_info(repo_id, timeout=hub.constants.HF_HUB_DOWNLOAD_TIMEOUT)
    files = {file.rfilename for file in info.siblings or []}
    weights = whole_weights(files)
    if quantization or not weights and INDEX not in files:
        if file := named_gguf(ggufs := gguf_names(files), quantization):
            if absent := {*part_names(file)} - files:
                raise InputError(f"{repo_id}: the hub has no {min(absent)}, a part of the model")
            commit = None
            for each in filter(None, (tower_name(files), *part_names(file))):  # the tower before the model's files
                path = hub.hf_hub_download(repo_id, each, revision=commit)
                folder = Path(path).parents[each.count("/")]
                commit = folder.name  # all others from the same one
            return folder / file
        if not ggufs:
            raise InputError(f"{repo_id}: the hub has no {WEIGHTS} and no whole GGUF file of it")
        raise InputError(f"{repo_id}: choose one of its GGUF files {some(ggufs, 50)}, like {repo_id}:{min(ggufs)}")
    if absent := {CONFIG, *tokenizer_files(files)} - files:
        raise InputError(f"{repo_id}: this is not a model folder: the hub has no {min(absent)} of it")
    folder = Path(hub.hf_hub_download(repo_id, CONFIG)).parent
    commit = folder.name  # all others from the same one, even if a new one is published meanwhile
    small = [file for file in (*tokenizer_files(files), *OPTIONAL, INDEX) if file in files]
    for file in (*small, *module_files(files)):
        hub.hf_hub_download(repo_id, file, revision=commit)
    weights = weights or weight_files(folder)
    if not files.issuperset(weights or [""]):
        raise InputError(f"{repo_id}: {INDEX} lists {some(weights) or 'nothing'}, which the hub doesn't have")
    for file in [*{MTP_FILE} & files, *weights]:
        hub.hf_hub_download(repo_id, file, revision=commit)
    return folder


def why(hub: ModuleType, error: BaseException, repo_id: str) -> str:
    """What an error of the client, the network or the disk means, and what to do."""
    endpoint = hub.constants.ENDPOINT
    if isinstance(error, hub.errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # why the hub could not be asked
    if isinstance(error, hub.errors.GatedRepoError):
        return f"accept its conditions on {endpoint}/{repo_id}, then set HF_TOKEN to a token of your account there"
    if isinstance(error, hub.errors.HfHubHTTPError) and error.response.status_code in (401, 404):
        return f"there is no such folder, and {endpoint} has no such model, or HF_TOKEN gives no access to it"
    said = brief(str(error).strip().partition("\n")[0] or type(error).__name__)
    return (f"there is no such folder, and the download failed: {said}; check the network, HF_ENDPOINT, HF_TOKEN and "
            f"the hub's cache {hub_cache()}, then run the same command again: complete files are kept")
