"""The figures in bench/results/*.json as tables in README.md, docs/speed.md and bench/RESULTS.md, and as a picture.

    python bench/figures.py            names the pages whose tables differ from the files; status 1 if there are any
    python bench/figures.py --write    writes the tables, and with matplotlib bench/results.png

A file describes one machine: `speeds` are tokens/s, work -> format -> engine, in the format of ours that the engine's
own comes closest to (Q8_0: int8, Q4_0: int4; of ours, float32 is qwen3.py, the others are the fast engine). `shares` of
the memory's bandwidth are of ours. `bandwidth` is in GB/s, `sgemm` in GFLOP/s, both None if they were not measured.
README.md and docs/speed.md show the CPUs of the newest measurement; bench/RESULTS.md shows all CPUs.
"""
import argparse
import json
import re
import textwrap
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

from harness import ROOT, table

OURS = "ours"
MARKED = re.compile(r"(<!-- figures -->\n).*?(<!-- end -->)", re.DOTALL)


def load_machines() -> list[dict]:
    """All machines, the latest measurement first; of one day, a whole CPU before one that was held to AVX2."""
    files = sorted((ROOT / "bench/results").glob("*.json"), key=lambda file: file.stem)
    return sorted((json.loads(file.read_text("utf-8")) for file in files), key=lambda m: m["date"], reverse=True)


def newest(machines: list[dict]) -> list[dict]:
    """Those of the newest measurement, which may have begun on the day before."""
    first = date.fromisoformat(machines[0]["date"]) - timedelta(days=1)
    return [m for m in machines if date.fromisoformat(m["date"]) >= first]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def share(m: dict, work: str, name: str) -> str:
    value = m["shares"].get(work, {}).get(name)
    return "" if value is None else f"{value:.2f}"


def ratio(engines: dict[str, float]) -> str:
    """Our tokens/s, divided by those of the fastest other engine."""
    peers = [speed for name, speed in engines.items() if name != OURS]
    return f"{engines[OURS] / max(peers):.2f}" if peers and OURS in engines else "–"


def engines_of(machine: dict) -> list[str]:
    """Ours first."""
    cells = [engines for formats in machine["speeds"].values() for engines in formats.values()]
    return list(dict.fromkeys(name for engines in cells for name in engines))


def peers_of(m: dict) -> str:
    """What the ratios of the fast engine stand beside."""
    names = dict.fromkeys(name for formats in m["speeds"].values() for form, engines in formats.items()
                          for name in engines if form != "float32" and name != OURS)
    return ", ".join(names) + " alone" * (len(names) == 1)


def version_of(m: dict) -> str:
    return f"version {m['version']} of {m['date']}"


def conditions(m: dict) -> str:
    limits = [f"{name} {m[key]:g} {unit}, " for key, name, unit in
              (("bandwidth", "memory", "GB/s"), ("sgemm", "sgemm", "GFLOP/s")) if m[key]]
    return f"{m['cores']} cores, {''.join(limits)}{version_of(m)}, beside {peers_of(m)}"


def ratios_table(machines: list[dict]) -> str:
    """One row for each machine: bf16, int8 and int4 beside the fastest other engine, in what all have measured."""
    works = [work for work in machines[0]["speeds"] if all(work in m["speeds"] for m in machines)]
    lines = [["", *works, "beside"]]
    for m in machines:
        ratios = []
        for found in (m["speeds"][work] for work in works):
            bf16 = found.get("bf16, activations too", found.get("bf16", {}))  # as the fast engine has it by default
            ratios.append(" / ".join(map(ratio, (bf16, found.get("int8", {}), found.get("int4", {})))))
        lines.append([f"{m['machine']}, {version_of(m)}", *ratios, peers_of(m)])
    return "\n".join(table(*lines))


def speeds_table(m: dict) -> str:
    """Our tokens/s, in brackets the ratio to the fastest other engine, and the share of the memory's bandwidth."""
    formats = list(dict.fromkeys(name for cells in m["speeds"].values() for name in cells))
    lines = [["tokens/s", *formats]]
    for work, cells in m["speeds"].items():
        lines.append([work, *(f"{number(cells[name].get(OURS))} ({ratio(cells[name])})" if name in cells else "–"
                              for name in formats)])
        if work in m["shares"]:
            lines.append(["share of the memory's bandwidth", *(share(m, work, name) or "–" for name in formats)])
    return "\n".join([f"**{m['machine']}**, {conditions(m)}:", "", *table(*lines)])


def whole_table(m: dict) -> str:
    """All that was measured on a machine, with its conditions."""
    names = engines_of(m)
    lines = [["", "format", *names, "ours / the fastest other", "share of the memory's bandwidth"]]
    for work, formats in (m["speeds"] | m["others"]).items():
        for name, engines in formats.items():
            speed = work in m["speeds"]
            lines.append([work + ", tokens/s" * speed, name, *(number(engines.get(each)) for each in names),
                          ratio(engines) if speed else "", share(m, work, name)])
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    return "\n".join([f"## {m['machine']}", "", f"{conditions(m)}. Measured by: {m['method']}. {versions}.", "",
                      *table(*lines), "", *(f"- {note}" for note in m["notes"])])


def pages() -> Iterator[tuple[Path, str]]:
    """Each page with the text that it should have."""
    machines = load_machines()
    for name, text in (("README.md", ratios_table(newest(machines))),
                       ("docs/speed.md", "\n\n".join(map(speeds_table, newest(machines)))),
                       ("bench/RESULTS.md", "\n\n".join([ratios_table(machines), *map(whole_table, machines)]))):
        page = ROOT / name
        yield page, MARKED.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page.read_text("utf-8"))


def draw(m: dict, file: Path) -> None:
    """Bars of all engines for each work, below the line that the memory draws for ours."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(3.2 * len(m["speeds"]), 4), layout="constrained")
    labels, width = {}, 0.8 / len(engines_of(m))
    for axes, (work, formats) in zip(figure.subplots(1, len(m["speeds"])), m["speeds"].items()):
        for i, name in enumerate(engines_of(m)):
            places = [k + (i + 0.5) * width - 0.4 for k in range(len(formats))]
            heights = [engines.get(name, 0) for engines in formats.values()]
            labels[name] = axes.bar(places, heights, width, color=f"C{i}")
        axes.bar_label(axes.containers[0], [number(engines.get(OURS)) for engines in formats.values()], fontsize=8)
        for k, name in enumerate(formats):
            if fraction := m["shares"].get(work, {}).get(name):
                limit = formats[name][OURS] / fraction
                labels["the memory's limit for ours"] = axes.hlines(limit, k - 0.4, k + 0.4, color="black")
        axes.set_xticks(range(len(formats)), [textwrap.fill(name, 11) for name in formats], fontsize=7)
        axes.set(title=work)
        axes.margins(y=0.1)
    figure.axes[0].set(ylabel="tokens/s")
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=len(labels))
    figure.suptitle(f"{m['machine']}, {conditions(m)}", fontsize=10)
    figure.savefig(file, dpi=100)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    differing = [(page, text) for page, text in pages() if page.read_text("utf-8") != text]
    for page, text in differing:
        print(f"{page}: {'written' if write else 'its tables differ from bench/results'}")
        if write:
            page.write_text(text, "utf-8")
    if not write:
        return int(bool(differing))
    try:
        draw(load_machines()[0], ROOT / "bench/results.png")
    except ImportError:
        print("no picture: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
