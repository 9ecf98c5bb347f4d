"""Progress bars on stderr, where that is a terminal."""
import sys
from collections.abc import Iterable
from typing import Any


class NoBar:
    """In place of a bar that nobody sees.

    tqdm's lock is shared with forked processes: if one of them is killed while it holds the lock, all others would wait
    for ever. So servers and pipes never touch tqdm.
    """

    def __enter__(self) -> "NoBar":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, *_: Any, **__: Any) -> None:
        pass

    set_postfix_str = clear = refresh = update


def progress(items: Iterable[Any] | None = None, description: str = "", delay: float = 1, **options: Any) -> Any:
    """The items with tqdm's bar, shown after a `delay` in seconds; none where stderr is no terminal. `options` are
    tqdm's."""
    if sys.stderr is None or not sys.stderr.isatty():
        return NoBar() if items is None else items
    from tqdm import tqdm  # here, because importing it takes time
    return tqdm(items, description, delay=delay, leave=False, **options)
