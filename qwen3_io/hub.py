"""Models by name: a folder, or a model of the Hugging Face hub, which is downloaded once and then taken from the cache.

    resolve_model("models/mine")                a folder, unchanged; a GGUF file, too
    resolve_model("Qwen/Qwen3-0.6B")            a model of the hub: owner/name
    resolve_model("Qwen3-0.6B")                 the same without its owner
    resolve_model("0.6B")                       the same, for short
    resolve_model("Qwen/Qwen3-8B-GGUF:Q4_K_M")  a GGUF file of the hub: owner/name:QUANTIZATION
    cached_models()                             the models in the hub's cache
    check_blobs(folder)                         the damaged files of a model in the hub's cache

The hub's own client, huggingface_hub, finds the cache, downloads and draws the progress bars. It reads its settings
(HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, ...) from the environment when it is imported, and that
takes time: so it is imported only for a name that is not a folder, and handed on as `hub`.

A hub is not trusted. Limits on sizes, waiting times and the rate hold for each request (see Watch), what becomes a file
name is checked, and the token is sent to HF_ENDPOINT alone. The Xet protocol, which downloads by code and connections
of its own, out of reach for these limits, is never used (as with HF_HUB_DISABLE_XET=1): the hub has each file by plain
HTTP, too.
"""
import contextlib
import errno
import functools
import hashlib
import logging
import os
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from qwen3_io.errors import LARGEST_TEXT, InputError, brief, read_json, read_json_object, some
from qwen3_io.gguf_file import gguf_json, is_gguf
from qwen3_io.progress import progress

SHORT_NAMES = {size: f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")}
# How the parts of Qwen's names are spelled: the hub's cache, unlike the hub, tells 0.6b from 0.6B.
SPELLING = {part.lower(): part for part in (
    *SHORT_NAMES, "30B", "A3B", "235B", "A22B", "Base", "Instruct", "Thinking", "Embedding", "Reranker", "Coder",
    "FP8", "AWQ", "GPTQ", "GGUF", "Int4", "Int8")}

CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"
INDEX = "model.safetensors.index.json"  # of weights in several files, the shards
OPTIONAL = ("generation_config.json", "tokenizer_config.json", "chat_template.jinja")
IN_A_FOLDER = f"a model is a folder with {CONFIG}, {TOKENIZER} and {WEIGHTS}, or a GGUF file"
AGAIN = "run the same command again, files that are complete are kept"
GGUF_PART = re.compile("-[0-9]{5}-of-[0-9]{5}$", re.ASCII)  # the names of the parts of a GGUF file end so
SAFE_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._+=-]{1,128}", re.ASCII)  # stays in its folder, whatever the file system

LARGEST_ANSWER = 2**24  # bytes of any answer that is no file of a model
LARGEST_WEIGHTS = 50 * 10**9  # bytes of a file of weights; the client takes no larger one by plain HTTP
WINDOW = 60  # seconds: for a whole answer that is no file, and for measuring the rate of a file
SLOWEST = 1000  # bytes a second, on average over a window
LONGEST_WAIT = 60  # seconds that a hub may ask to wait before the next try
DOWNLOADING = threading.Lock()  # the client's settings are those of the whole process


def resolve_model(name: str, offline: bool = False) -> Path:
    """The folder with a model's files, or its GGUF file. `name` is one of these, owner/name on the hub, or a size.

    With GGUF files on the hub it is owner/name:QUANTIZATION, or owner/name where there is only one. A folder comes
    first, then the hub's cache; only what isn't completely there is downloaded, and when `offline` or
    HF_HUB_OFFLINE=1, nothing is. For a model's folder in the hub's cache (models--owner--name) it is the snapshot of
    its main branch. Raises InputError for what can't be a model's name, and when a download fails.
    """
    path = os.path.expanduser(name) if name == "~" or name.startswith("~/") else name
    if os.path.isdir(path):
        folder = Path(path)
        if not os.path.lexists(folder / CONFIG):
            folder = main_snapshot(folder) or folder
        return folder if os.path.lexists(folder / CONFIG) else only_gguf(folder) or folder
    if is_gguf(Path(path)):
        return Path(path)
    if os.path.exists(path):
        raise InputError(f"{brief(name)}: {no_folder(Path(path))}")
    hub = import_client(name)
    repo_id, quantization = hub_id(hub, name)
    cached = None if quantization else cached_folder(hub, repo_id)
    ggufs = cached_ggufs(hub, repo_id)
    if cached is None and len(found := matching(ggufs, quantization)) == 1:
        cached = ggufs[found[0]]
    if cached is None and (offline or hub.is_offline_mode()):
        if ggufs:
            chosen_gguf(repo_id, ggufs, quantization, "in the hub's cache")  # says which ones are there
        which = f"{repo_id} --include '*{quantization}.gguf'" if quantization else repo_id
        raise InputError(f"{repo_id}: no such folder, not (or not completely) in the hub's cache "
                         f"{hub.constants.HF_HUB_CACHE} either, and offline; once online, run the command again, or: "
                         f"hf download {which}")
    return cached or download(hub, repo_id, quantization)


# ----------------------------------------------------------------------------------------------------------------------
# Names
# ----------------------------------------------------------------------------------------------------------------------

def no_folder(file: Path) -> str:
    """Why a file is no model, and what to do."""
    beside = f"; give {file.parent}" if os.path.isfile(file.parent / CONFIG) else ""
    return f"not a folder; {IN_A_FOLDER}{beside}"


def only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder that has one of them."""
    files = [file for file in folder.glob("*.gguf") if is_gguf(file)]
    return files[0] if len(files) == 1 else None


def import_client(name: str) -> ModuleType:
    """huggingface_hub. Raises InputError where it isn't installed or can't make sense of its environment variables."""
    try:
        import huggingface_hub.file_download  # reads all the settings, which a lazy huggingface_hub puts off
    except (ImportError, ValueError) as error:
        raise InputError(f"{brief(name)}: no such folder, and huggingface_hub, which asks the hub, can't be imported: "
                         f"{brief(error)}; install it, or correct the HF_... environment variables") from error
    return huggingface_hub


def hub_id(hub: ModuleType, name: str) -> tuple[str, str]:
    """(the model's owner/name on the hub, the quantization that the name ends with, or an empty text).

    Raises InputError for anything that is neither a short name nor a valid id.
    """
    model, colon, quantization = name.partition(":")
    repo_id = SHORT_NAMES.get(model.upper(), model)
    if of_qwen := re.fullmatch(r"(?:Qwen/)?Qwen3-(.+)", model, re.ASCII | re.IGNORECASE):
        repo_id = "Qwen/Qwen3-" + "-".join(SPELLING.get(part.lower(), part) for part in of_qwen[1].split("-"))
    with contextlib.suppress(hub.errors.HFValidationError):
        hub.utils.validate_repo_id(repo_id)
        if "/" in repo_id and (not colon or SAFE_NAME.fullmatch(quantization)):
            return repo_id, quantization
    raise InputError(f"{brief(name)}: no such folder or file, and no model of the hub: those are called owner/name, "
                     f"like Qwen/Qwen3-0.6B, or for short {', '.join(SHORT_NAMES)}; a GGUF file of the hub is called "
                     "owner/name:QUANTIZATION, like Qwen/Qwen3-0.6B-GGUF:Q8_0")


def quantization_of(file: str) -> str:
    """The end of a GGUF file's name: Q4_K_M of Qwen3-8B-Q4_K_M.gguf, UD-Q4_K_XL of Qwen3-8B-UD-Q4_K_XL.gguf."""
    found = re.search(r"(?:\bUD-)?[^-.]*$", GGUF_PART.sub("", Path(file).stem), re.IGNORECASE)
    return found[0] if found and found[0] else Path(file).stem


def gguf_names(files: Collection[str]) -> dict[str, str]:
    """How a user names each GGUF file of a model -> the file: by its quantization; with two of the same, all of it."""
    quantizations = {file: quantization_of(file) for file in sorted(files)}
    counts = Counter(quantizations.values())
    return {Path(file).stem if counts[each] > 1 else each: file for file, each in quantizations.items()}


def matching(files: Iterable[str], quantization: str, parts: bool = False) -> list[str]:
    """The GGUF files that a user means by a name as in gguf_names, all if it is empty; or `parts` of such files."""
    wanted = quantization.lower()
    return sorted(file for file in files if wanted in ("", quantization_of(file).lower(), Path(file).stem.lower())
                  and parts == bool(GGUF_PART.search(Path(file).stem)))


def chosen_gguf(repo_id: str, files: Collection[str], quantization: str, where: str) -> str:
    """The one GGUF file of this quantization. Raises InputError that lists the files there are, or for parts."""
    if len(found := matching(files, quantization)) == 1:
        return found[0]
    if not found and (parts := matching(files, quantization, parts=True)):
        raise InputError(f"{repo_id}: {parts[0]} is one of the parts of a GGUF file, which can't be read; choose a "
                         "quantization in one file, or download the parts and join them: llama-gguf-split --merge")
    has = "several GGUF files" if found else f"no GGUF file {quantization}"
    names = list(gguf_names(matching(files, "") or files))
    raise InputError(f"{repo_id}: has {has} {where}; choose one of {some(names, 50)}, like this: {repo_id}:{names[0]}")


def open_and_read(file: Path, size: int) -> bytes:
    """The first bytes of a file."""
    with open(file, "rb") as opened:
        return opened.read(size)


# ----------------------------------------------------------------------------------------------------------------------
# The hub's cache: models--owner--name/ with refs/main, which names a commit, snapshots/<commit>/ with links, and blobs/
# ----------------------------------------------------------------------------------------------------------------------

def cached_models() -> list[tuple[str, Path]]:
    """(owner/name, folder) of the models in the hub's cache that are called Qwen or whose config.json says so, sorted.

    A GGUF file has a row for itself: (owner/name:QUANTIZATION, file). Complete or not, supported or not. Needs neither
    the hub nor its client.
    """
    found = []
    for home in hub_cache().glob("models--*--*"):
        folder, name = main_snapshot(home), home.name.removeprefix("models--").replace("--", "/")
        if folder is None:
            continue
        ggufs = ggufs_in(folder)
        models = {f"{name}:{each}": ggufs[file] for each, file in gguf_names(ggufs).items()}
        if not ggufs or any(os.path.exists(folder / file) for file in (WEIGHTS, INDEX)):
            models[name] = folder
        found += [(each, path) for each, path in models.items()
                  if "qwen" in f"{each}/{path.name}".lower() or model_type(path).startswith("qwen")]
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
        commit = open_and_read(ref, 1000).decode()
    except (OSError, UnicodeDecodeError):
        return None
    folder = home / "snapshots" / commit
    return folder if SAFE_NAME.fullmatch(commit) and os.path.isdir(folder) else None


def model_type(path: Path) -> str:
    """model_type of a folder's config.json, or of a GGUF file; or an empty text."""
    try:
        if is_gguf(path):
            return str((gguf_json(path, CONFIG) or {}).get("model_type"))
        return str(read_json_object(path / CONFIG).get("model_type")) if os.path.isfile(path / CONFIG) else ""
    except InputError:
        return ""


def cached_folder(hub: ModuleType, repo_id: str) -> Path | None:
    """The model's folder in the hub's cache, or None if a file that is needed isn't there. Doesn't ask the hub."""
    with client_errors(hub, repo_id):
        config = hub.try_to_load_from_cache(repo_id, CONFIG)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    weights = [WEIGHTS] if os.path.exists(folder / WEIGHTS) else shards(folder)
    return folder if weights and all(os.path.isfile(folder / file) for file in (TOKENIZER, *weights)) else None


def ggufs_in(folder: Path) -> dict[str, Path]:
    """The GGUF files in a folder: name -> path."""
    return {file.name: file for file in folder.iterdir() if is_gguf_name(file.name) and os.path.isfile(file)}


def is_gguf_name(file: str) -> bool:
    return bool(SAFE_NAME.fullmatch(file)) and file.lower().endswith(".gguf")


def cached_ggufs(hub: ModuleType, repo_id: str) -> dict[str, Path]:
    """The GGUF files of a model in the hub's cache: name -> path. Doesn't ask the hub."""
    folder = main_snapshot(Path(hub.constants.HF_HUB_CACHE) / f"models--{repo_id.replace('/', '--')}")
    return {} if folder is None else ggufs_in(folder)


def shards(folder: Path) -> list[str]:
    """The weight files that a folder's index lists; none where there is no index, or a damaged one."""
    try:
        return sorted(set(map(str, read_json(folder / INDEX)["weight_map"].values())))
    except (InputError, LookupError, TypeError, AttributeError):
        return []


def check_blobs(folder: Path) -> list[str]:
    """The names of a model's damaged files, by the checksums that are the names of the blobs in the hub's cache.

    A blob is called by the SHA-256 of its bytes, or if it is small, by the SHA-1 that git gives it. Raises InputError
    for a folder without such links: outside of the hub's cache, or on a disk that has no links.
    """
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]  # a GGUF file
    links = {file: Path(os.readlink(file)) for file in files if file.is_symlink()}
    sums = {file: blob.name for file, blob in links.items()
            if blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob.name)}
    if not sums:
        raise InputError(f"{folder}: no links to files of the hub's cache, whose names are checksums, so there is "
                         "nothing to compare with")
    sizes = {file: os.path.getsize(file) if os.path.isfile(file) else -1 for file in sums}
    with progress(description="verifying", total=sum(sizes.values()), unit="B", unit_scale=True) as bar:
        return [file.name for file, name in sums.items()
                if sizes[file] < 0 or blob_sum(file, sizes[file], len(name), bar.update) != name]


def blob_sum(file: Path, size: int, digits: int, progress: Callable[[int], object]) -> str:
    """The name that a file's bytes have as a blob: SHA-256 (64 digits), or git's SHA-1 with the size before them."""
    summed = hashlib.sha256() if digits == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    try:
        with open(file, "rb") as opened:
            while data := opened.read(2**20):
                summed.update(data)
                progress(len(data))
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from error
    return summed.hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Downloading
# ----------------------------------------------------------------------------------------------------------------------

def download(hub: ModuleType, repo_id: str, quantization: str = "") -> Path:
    """Downloads the missing files of a model into the hub's cache -> the model's folder there, or its GGUF file.

    The weights come last: a cache that has them all has the optional files too. snapshot_download would do everything
    in one call, but Ctrl-C doesn't stop it, and it waits without end for a hub that doesn't answer.
    """
    with limited(hub) as watch:
        files = listed_files(hub, repo_id)
        lacking = [] if files & {WEIGHTS, INDEX} else [f"{WEIGHTS} or {INDEX}"]
        lacking = [file for file in (CONFIG, TOKENIZER) if file not in files] + lacking
        ggufs = [file for file in files if is_gguf_name(file)]

        def fetch(file: str, revision: str) -> Path:
            watch.expect(file, LARGEST_WEIGHTS if file.lower().endswith((".safetensors", ".gguf")) else LARGEST_TEXT)
            with client_errors(hub, repo_id):
                return Path(hub.hf_hub_download(repo_id, file, revision=revision))

        if ggufs and (quantization or lacking):
            return fetch(chosen_gguf(repo_id, ggufs, quantization, "on the hub"), "main")
        if quantization:
            raise InputError(f"{repo_id}: has no GGUF files on the hub (folders in it don't count); leave out "
                             f":{quantization}, or choose a model with such files, most are called ...-GGUF")
        if lacking:
            raise InputError(f"{repo_id}: has no {', no '.join(lacking)} on the hub; choose a model with these files")
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


def listed_files(hub: ModuleType, repo_id: str) -> set[str]:
    """The names of a model's files on the hub, without sub-folders."""
    with client_errors(hub, repo_id):
        info = hub.HfApi().model_info(repo_id, timeout=hub.constants.HF_HUB_DOWNLOAD_TIMEOUT)
        return {file.rfilename for file in info.siblings or [] if not {"/", "\\"} & set(file.rfilename)}


# ----------------------------------------------------------------------------------------------------------------------
# Limits: bytes and seconds of a hub's answers, and the host that gets the token
# ----------------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def limited(hub: ModuleType) -> Iterator["Watch"]:
    """Limits the hub's client within this block, and restores its settings afterwards. One block at a time."""
    from huggingface_hub.utils import _http
    with DOWNLOADING:
        factory, disabled = _http._GLOBAL_CLIENT_FACTORY, hub.constants.HF_HUB_DISABLE_XET
        watch = Watch(hub)
        try:
            hub.constants.HF_HUB_DISABLE_XET = True
            hub.set_client_factory(lambda: watch.over(factory()))
            yield watch
        finally:
            hub.set_client_factory(factory)
            hub.constants.HF_HUB_DISABLE_XET = disabled


class Watch:
    """Limits for the requests about one file after the other; a hub that breaks one is given up with an InputError.

    An answer that is no file of a model has LARGEST_ANSWER bytes at most, and all its bytes are here WINDOW seconds
    after the request. A file has exactly the size that the hub announced and comes at SLOWEST bytes a second at least.
    """

    def __init__(self, hub: ModuleType):
        self.hub, self.endpoint = hub, hub.constants.ENDPOINT
        self.waited, self.received, self.is_file = 0.0, 0, False  # the present request's, or window's
        self.expect("", LARGEST_ANSWER)

    def expect(self, file: str, largest: int) -> None:
        """The next requests are about this file (of a model, unless empty)."""
        self.file, self.largest = file, largest
        self.announced: int | None = None
        self.budget = 2 * LARGEST_ANSWER  # bytes for all the requests: a hub can't make us begin again for ever

    def over(self, client: Any) -> Any:
        """The client, watched."""
        home = self.origin(self.hub.utils.httpx.URL(self.endpoint))

        def before(request: Any) -> None:
            request.headers["Accept-Encoding"] = "identity"  # 1 MB of gzip can be 1 GB of zeros
            if self.origin(request.url) != home:  # a redirect; or what the client, too, takes for the hub
                request.headers.pop("Authorization", None)
            request.extensions["trace"] = self.trace

        client.timeout = self.hub.constants.HF_HUB_DOWNLOAD_TIMEOUT  # for requests that have none
        client.event_hooks["request"].append(before)
        client.event_hooks["response"].append(self.check)
        return client

    @staticmethod
    def origin(url: Any) -> tuple[str, str, int | None]:
        return url.scheme, url.host, url.port  # no port: the usual one of the scheme

    def trace(self, event: str, about: dict[str, Any]) -> None:
        """Called by the HTTP library: a new request, whose bytes are counted anew; a new connection, to be watched."""
        if event.endswith(".send_request_headers.started"):
            self.waited, self.received, self.is_file = 0.0, 0, False
        elif event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            connection = about["return_value"]
            connection.read = functools.partial(self.read, connection.read)

    def read(self, read: Callable[..., bytes], *args: Any, **options: Any) -> bytes:
        """Reads from a connection."""
        start = time.monotonic()
        data = read(*args, **options)
        self.waited += time.monotonic() - start
        self.received += len(data)
        self.budget -= len(data)
        if self.budget < 0:
            raise InputError(f"{self.endpoint} sends much more than it announced, or begins again and again; {AGAIN}")
        if self.waited > WINDOW:
            if not self.is_file:
                raise InputError(f"{self.endpoint} takes more than {WINDOW} seconds for an answer; check the network, "
                                 f"then {AGAIN}")
            if self.received < WINDOW * SLOWEST:
                raise InputError(f"{self.endpoint} sends too slowly, fewer than {SLOWEST} bytes a second over {WINDOW} "
                                 f"seconds; check the network, then {AGAIN}")
            self.waited, self.received = 0.0, 0
        return data

    def check(self, response: Any) -> None:
        """Called by the HTTP library with the head of an answer: checks it, and puts a limit on the rest."""
        headers, good = response.headers, response.status_code < 400
        if not good:
            self.check_wait(headers)
        if response.request.method == "HEAD":
            check_names(headers, ("ETag", "X-Linked-Etag", "X-Repo-Commit") if good else ("X-Repo-Commit",))
            size = headers.get("X-Linked-Size") or (None if response.is_redirect else headers.get("Content-Length"))
            self.announced = self.size(size) if good else None
            return
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ValueError(f"the answer is packed by {brief(headers['Content-Encoding'])}, though that wasn't asked")
        limit = LARGEST_ANSWER
        if self.file and response.status_code in (200, 206):
            if self.announced is None:
                self.announced = self.size(headers.get("Content-Length")) or LARGEST_TEXT
            resumed = re.match("bytes=([0-9]+)-", response.request.headers.get("Range", ""))
            limit = self.announced - (int(resumed[1]) if resumed and response.status_code == 206 else 0)
            self.waited, self.received, self.is_file = 0.0, 0, True
        limit_body(response, limit, self.file or "an answer")

    def size(self, announced: str | None) -> int | None:
        """The size of the file as the hub announces it. Raises InputError if that is too much."""
        if not announced or not re.fullmatch("[0-9]{1,18}", announced):
            return None
        size = int(announced)
        if self.file and size > self.largest:
            raise InputError(f"{self.endpoint} announces {self.file} with {size} bytes, but more than {self.largest} "
                             "can't be right; choose another model")
        self.budget += 2 * size
        return size

    def check_wait(self, headers: Any) -> None:
        """Raises InputError if the hub asks for a long wait before the next try, which the client would sit out."""
        asked = [headers.get("Retry-After", ""), *re.findall(r"t\s*=\s*([0-9]+)", headers.get("RateLimit", ""))]
        for seconds in asked:
            if re.fullmatch("[0-9]+", seconds) and (len(seconds) > 9 or int(seconds) > LONGEST_WAIT):
                raise InputError(f"{self.endpoint} asks to wait {brief(seconds, 9)} seconds before the next request; "
                                 "run the same command again then")


def check_names(headers: Any, names: tuple[str, ...]) -> None:
    """Raises ValueError if a header from which the client makes a file's or folder's name makes none, or another."""
    for name in names:
        value = headers.get(name)
        if value is not None and not SAFE_NAME.fullmatch(value.lstrip("W/").strip('"')):
            raise ValueError(f"the header {name}: {brief(value, 80)} is no name for a file of the cache")


def limit_body(response: Any, limit: int, what: str) -> None:
    """Makes an answer that isn't read yet raise InputError instead of giving out more than `limit` bytes."""
    iter_raw = response.iter_raw

    def iter_some(*args: Any, **options: Any) -> Iterator[bytes]:
        left = limit
        for chunk in iter_raw(*args, **options):
            left -= len(chunk)
            if left < 0:
                raise InputError(f"the hub sends more than {limit} bytes for {what}, too many to be right; {AGAIN}")
            yield chunk

    response.iter_raw = iter_some


# ----------------------------------------------------------------------------------------------------------------------
# What the client raises, in the user's words
# ----------------------------------------------------------------------------------------------------------------------

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
        case InputError():
            return str(error)
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
