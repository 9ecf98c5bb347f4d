"""One HTML file: arrays as base64, the source with its lines, and the page's own style and program within it."""
from __future__ import annotations

import ast
import base64
import hashlib
import json
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

ROOM = Path(__file__).resolve().parent
FILES = {  # name in page.html -> what stands there; uplot/ is uPlot's npm package
    "UPLOT_STYLE": "uplot/uPlot.min.css", "STYLE": "page.css", "UPLOT": "uplot/uPlot.iife.min.js", "PROGRAM": "page.js",
    "LICENCE": "uplot/LICENSE"}


def pack(array: np.ndarray, dtype: str) -> dict[str, Any]:
    """An array for the page's program: its shape, "f2" or "f4", and little-endian numbers in base64."""
    limit = np.finfo(dtype).max
    data = np.clip(array, -limit, limit).astype("<" + dtype).tobytes()
    return {"shape": list(array.shape), "dtype": dtype, "data": base64.b64encode(data).decode("ascii")}


def lines_of_functions(source: str) -> dict[str, list[int]]:
    """Name -> [first line, last line] of each function, class and method ("KVCache.append") of a module."""
    lines = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            lines[node.name] = [node.lineno, node.end_lineno or node.lineno]
            for inner in node.body:
                if isinstance(node, ast.ClassDef) and isinstance(inner, ast.FunctionDef):
                    lines[f"{node.name}.{inner.name}"] = [inner.lineno, inner.end_lineno or inner.lineno]
    return lines


def html(contents: dict[str, Any]) -> str:
    """The page. It can load nothing and run only its own programs, whatever its texts contain.

    The texts are one JSON value whose "<" are escaped, and the program puts them into the page as text. The content
    security policy allows the styles and the programs by their hashes, and nothing else.
    """
    values = {name: (ROOM / file).read_text("utf-8") for name, file in FILES.items()}
    values["POLICY"] = (
        f"default-src 'none'; style-src {hashes(values['UPLOT_STYLE'], values['STYLE'])}; "
        f"script-src {hashes(values['UPLOT'], values['PROGRAM'])}; base-uri 'none'; form-action 'none'")
    values["LICENCE"] = escape(values["LICENCE"], quote=False)
    values["CONTENTS"] = json.dumps(contents, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    pieces = (ROOM / "page.html").read_text("utf-8").split("@@")  # text, name, text, name, ..., text
    return "".join(values[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def hashes(*texts: str) -> str:
    """The hashes of styles or programs, as a content security policy names them."""
    digests = [hashlib.sha256(text.encode("utf-8")).digest() for text in texts]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode('ascii')}'" for digest in digests)
