"""Many prompts on many machines: the job of qwen3_batch.py on Ray Data. Needs pip install "ray[data]", too.

    python examples/ray_batch.py in.jsonl out/ --model Qwen/Qwen3-0.6B --actors 2          on this machine
    python examples/ray_batch.py in.jsonl out/ --address HOST:6379 --actors 100            on a Ray cluster
    cat out/*.jsonl

Records and results have the same form as in qwen3_batch.py (docs/batch.md); results come in any order, and "line" tells
the record. Ray restarts a worker that dies, and gives its records to a worker again. When the job was stopped, the same
command goes on where it stopped. On a cluster, all machines need the same paths: this program, the input, the output,
and the model's folder. docs/scaling.md says how many actors, slots and threads to take.
"""
import argparse
import hashlib
import json
import os
import socket
import sys
from array import array
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from qwen3 import BUNDLED, InputError  # noqa: E402
from qwen3_lib.app.records import JobSettings, answer_row, id_of, parsed_row, refused_row, request_of_row  # noqa: E402
from qwen3_batch import Batch  # noqa: E402
from qwen3_lib.io.errors import brief, read_json_object  # noqa: E402
from qwen3_lib.io.models import open_model  # noqa: E402

try:
    import ray.data.checkpoint
except ImportError as missing:
    sys.exit(f'ray_batch.py: Ray Data can\'t be imported ({brief(missing)}): pip install "ray[data]"')

SETTINGS = JobSettings({"seed": 0})  # a record without a seed has its line's number less one as its seed
SPARE = 3  # CPUs that Ray needs for itself, to read and to write


class Worker:
    """An actor: loads the model once, then answers blocks of lines. `lines` holds number and start of each line."""

    def __init__(self, lines: array, args: argparse.Namespace):
        from qwen3_numba import load_model
        self.file, self.lines = open(args.input, "rb"), lines
        self.batch = Batch(load_model(args.model, args.quantize, args.threads), args.slots, args.positions)

    def __call__(self, block: dict) -> dict:
        """{"id": indices into lines} -> {"id", "result": JSON}."""
        results, running = {}, {}
        for i in block["id"].tolist():
            line, name = self.lines[2 * i], None
            self.file.seek(self.lines[2 * i + 1])
            try:
                record = parsed_row(self.file.readline())
                name = id_of(record, line)
                asked = request_of_row(self.batch.model, SETTINGS, record, line)
                [(ids, options)] = asked.answers
                self.batch.add(i, ids, asked.salt, options=options, tools=asked.tools)
                running[i] = line, name, False
            except InputError as error:
                results[i] = refused_row(error, line, name, False)
        while not self.batch.idle:
            for i, answer in self.batch.step():
                make = refused_row if isinstance(answer, InputError) else answer_row
                results[i] = make(answer, *running[i])
        return {"id": block["id"], "result": [json.dumps(results[i]) for i in block["id"].tolist()]}


class Lines(ray.data.datasource.BlockBasedFileDatasink):
    def write_block_to_file(self, block, file) -> None:
        file.write("".join(f"{result}\n" for result in block.to_arrow()["result"].to_pylist()).encode())


def run(args: argparse.Namespace) -> None:
    source = open_model(str(args.model))  # raises InputError here rather than in each worker
    if source.embeds:
        raise InputError(f"{source.path}: an embedding model gives vectors, not answers")
    if Path(args.model).exists():
        args.model = str(source.path.resolve())  # the workers are in other folders
    lines, digest, start = array("q"), hashlib.sha256(), 0
    with open(args.input, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                lines.extend((number, start))
            start += len(line)
            digest.update(line)
    if not lines:
        raise InputError(f"{args.input}: holds no records")
    job, about = args.out / "job.json", [args.model, args.quantize, args.positions, digest.hexdigest()]
    if job.exists() and read_json_object(job) != {"job": about}:
        raise InputError(f"{args.out}: belongs to a job with another input, model or option; give another folder")
    os.chdir(ROOT)  # Ray lets its workers import from the current folder
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
    args.out.mkdir(parents=True, exist_ok=True)
    job.write_text(json.dumps({"job": about}))
    ray.data.DataContext.get_current().checkpoint_config = ray.data.checkpoint.CheckpointConfig(
        "id", str(args.out / "done"), delete_checkpoint_on_success=False)
    ray.data.range(n := len(lines) // 2, override_num_blocks=n // args.block + 1).map_batches(
        Worker, batch_size=None, compute=ray.data.ActorPoolStrategy(size=args.actors), num_cpus=cpus,
        fn_constructor_args=(lines, args)).write_datasink(Lines(str(args.out), file_format="jsonl"))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("input", type=lambda name: Path(name).resolve(), help="JSON lines")
parser.add_argument("out", type=lambda name: Path(name).resolve(), help="folder for the results")
parser.add_argument("--model", default=str(BUNDLED), help="folder or name (default: the bundled model)")
parser.add_argument("--quantize", choices=["int8", "int4"])
parser.add_argument("--address", help="of a Ray cluster, HOST:PORT or auto (default: Ray on this machine alone)")
for name, value, what in (("actors", 1, "processes with a model"), ("threads", 1, "threads of each actor"),
                          ("slots", 16, "records that an actor answers at the same time"),
                          ("positions", 2048, "most tokens of a prompt and its answer"),
                          ("block", 256, "records that an actor takes at a time")):
    parser.add_argument(f"--{name}", type=int, default=value, help=f"{what} (default: %(default)s)")
args = parser.parse_args()
if min(args.actors, args.threads, args.slots, args.positions, args.block) < 1:
    parser.error("the numbers must be 1 or more")
try:
    run(args)
except (InputError, OSError, ray.exceptions.RayError) as error:
    sys.exit(f"ray_batch.py: {brief(error, 500)}")
