"""Many prompts on many machines: qwen3_batch.Batch in a pool of Ray Data's actors. Needs pip install "ray[data]", too.

    python examples/ray_batch.py in.jsonl out/ --model Qwen/Qwen3-0.6B --actors 2          on this machine
    python examples/ray_batch.py in.jsonl out/ --address HOST:6379 --actors 100            on a Ray cluster
    cat out/*.jsonl

A record is a line with "id", "prompt" or "messages", and maybe max_new_tokens, seed, temperature. A result is a line
with "line", "id", and "text" or "error"; results come in any order. Ray restarts a worker that dies, and gives its
records out again. Started again with the same command, the job goes on where it stopped. On a cluster, all machines
need the same paths: this program, the input, the output, and the model's folder. How to size it: docs/scaling.md.
"""
import argparse
import hashlib
import json
import socket
import sys
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # Ray hands it on to the workers

from qwen3 import BUNDLED, InputError, load_config  # noqa: E402
from qwen3_app.files import check_message  # noqa: E402
from qwen3_batch import Batch  # noqa: E402
from qwen3_io.errors import brief, parse_json, read_json_object  # noqa: E402
from qwen3_io.hub import resolve_model  # noqa: E402

try:
    import ray.data.checkpoint
except ImportError as missing:
    sys.exit(f'ray_batch.py: Ray Data can\'t be imported ({brief(missing)}): pip install "ray[data]"')

OPTIONS, SPARE = {"max_new_tokens", "seed", "temperature"}, 3  # CPUs that Ray needs for itself, to read and to write


class Worker:
    """An actor: loads the model once, and answers the records of some lines together."""

    def __init__(self, starts: array, args: argparse.Namespace):
        from qwen3_numba import load_model
        self.file, self.starts = open(args.input, "rb"), starts
        self.batch = Batch(load_model(args.model, args.quantize, args.threads), args.slots, args.positions)

    def __call__(self, block: dict) -> dict:
        """{"id": lines from 0 on} -> {"id", "result": JSON}."""
        results = {line: {"line": line + 1, "id": None} for line in block["id"].tolist()}
        for line, result in results.items():
            try:
                self.add(line, result)
            except InputError as error:
                result["error"] = str(error)
        while not self.batch.idle:
            for line, answer in self.batch.step():
                results[line] |= {"error": str(answer)} if isinstance(answer, InputError) else {
                    "text": answer.text, "finish_reason": answer.finish_reason, "tokens": len(answer.token_ids)}
        return {"id": block["id"], "result": [json.dumps(result) for result in results.values()]}

    def add(self, line: int, result: dict) -> None:
        """Gives the record of a line to the batch. Raises InputError."""
        self.file.seek(self.starts[line])
        record = parse_json(self.file.readline(), "the record")
        if not isinstance(record, dict) or ("prompt" in record) is ("messages" in record):
            raise InputError('a record must be an object with a "prompt" or with "messages"')
        result["id"], prompt = record.pop("id", None), [{"role": "user", "content": record.pop("prompt", None)}]
        if not isinstance(messages := record.pop("messages", prompt), list) or record.keys() - OPTIONS:
            raise InputError('"messages" must be a list, and options ' + ", ".join(sorted(OPTIONS)))
        for message in messages:
            check_message(message, "a message")
        tokenizer = self.batch.model.tokenizer
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages, join_text_parts=True))
        self.batch.add(line, ids, **({"seed": line} | record))  # the same answer when it is given out again


class Lines(ray.data.datasource.BlockBasedFileDatasink):
    def write_block_to_file(self, block, file) -> None:
        file.write("".join(f"{result}\n" for result in block.to_arrow()["result"].to_pylist()).encode())


def run(args: argparse.Namespace) -> None:
    load_config(resolve_model(args.model))  # raises InputError here rather than in each worker
    starts, digest = array("q"), hashlib.sha256()
    with open(args.input, "rb") as file:
        while line := file.readline():
            starts.append(file.tell() - len(line))
            digest.update(line)
    job, about = args.out / "job.json", [args.model, args.quantize, args.positions, digest.hexdigest()]
    if job.exists() and read_json_object(job) != {"job": about}:
        raise InputError(f"{args.out}: holds the results of another input, model or option; name another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    job.write_text(json.dumps({"job": about}))
    cpus = args.threads - 1 or 0.5  # with all threads of its actors counted, Ray could have no CPU left for itself
    if args.address is None:
        ray.init(num_cpus=int(args.actors * cpus) + SPARE + 1, include_dashboard=False, log_to_driver=False)
    else:
        if args.address != "auto":  # Ray would wait for minutes
            try:
                socket.create_connection(args.address.rpartition(":")[::2], timeout=10).close()
            except OSError as error:
                raise InputError(f"no Ray answers at {args.address}: {error}") from error
        ray.init(args.address, log_to_driver=False)
    if (there := ray.cluster_resources().get("CPU", 0)) < args.actors * cpus + SPARE:
        raise InputError(f"{args.actors} actors need {args.actors * cpus + SPARE:g} CPUs; the cluster has {there:g}")
    ray.data.DataContext.get_current().checkpoint_config = ray.data.checkpoint.CheckpointConfig(
        "id", str(args.out / "done"), delete_checkpoint_on_success=False)
    ray.data.range(len(starts), override_num_blocks=len(starts) // args.block + 1).map_batches(
        Worker, batch_size=None, compute=ray.data.ActorPoolStrategy(size=args.actors), num_cpus=cpus,
        fn_constructor_args=(starts, args)).write_datasink(Lines(str(args.out), file_format="jsonl"))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("input", type=lambda name: Path(name).resolve(), help="JSON lines")
parser.add_argument("out", type=lambda name: Path(name).resolve(), help="folder for the results")
parser.add_argument("--model", default=str(BUNDLED), help="folder or name (default: the bundled model)")
parser.add_argument("--quantize", choices=["int8", "int4"])
parser.add_argument("--address", help="of a Ray cluster, HOST:PORT or auto (default: Ray on this machine alone)")
for name, value, what in (("actors", 1, "processes with a model"), ("threads", 1, "threads of each actor"),
                          ("slots", 16, "records that an actor answers at the same time"),
                          ("positions", 2048, "most tokens of a prompt and its answer together"),
                          ("block", 256, "records that an actor takes at a time")):
    parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default: %(default)s)")
try:
    run(parser.parse_args())
except (InputError, OSError, ray.exceptions.RayError) as error:
    sys.exit(f"ray_batch.py: {brief(error, 500)}")
