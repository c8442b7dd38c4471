"""Record the scenes anew, and draw them: `make pictures`.

A recording replaces the one before only if its words have changed: figures and curves are never the same twice. Exit code 1: they have, or
a scene failed.
"""

from __future__ import annotations

import argparse
import difflib
import re
import signal
import sys
from contextlib import nullcontext

from pictures.cast import PROMPT, Cast, Lines, SceneError
from pictures.cast import shown as lines_of
from pictures.draw import Frame, frame, picture
from pictures.scenes import FIRST_ON_CLUSTER, ROOT, SCENES, WITHOUT_CLUSTER, cluster, stage

CASTS = ROOT / "docs/casts"
PICTURES = ROOT / "docs/pictures"
FILMS = ("quickstart", "chat", "top")
"""Scenes that move; of the others their last mark is shown."""
FRAME_SECONDS, PAUSE_SECONDS, END_SECONDS = 0.25, 1.5, 5.0
"""Shortest time of a frame; longest time in which nothing happens; time of the last frame."""
SPEED = 3
TERMINATED = 143
FIGURE = re.compile(r"\b(?:\d+[dhms])+\b|\d[\d.,:/a-f-]*(?: [KMG]i?B\b)?")
"""A duration, a size, or any other figure."""
CURVE = re.compile(r"[\u2500-\u259f\u2800-\u28ff]+")


def words(lines: Lines) -> Lines:
    """Return the lines without the parts that differ from run to run: figures, curves and bars, and the blanks that align them."""
    return [" ".join(CURVE.sub("|", FIGURE.sub("0", line)).split()) for line in lines]


def difference(old: Cast | None, new: Cast) -> Lines:
    """Return a diff of the words on the marked screens."""
    before, after = ({} if cast is None else cast.marked() for cast in (old, new))
    found: Lines = []
    for mark in dict.fromkeys((*before, *after)):
        found += difflib.unified_diff(words(before.get(mark, [])), words(after.get(mark, [])), f"{mark} before", f"{mark} now", lineterm="")
    return found


def drawn(name: str, cast: Cast) -> str:
    frames = film(cast) if name in FILMS else [last_mark(cast)]
    title = f"{cast.title}, {SPEED} times as fast" if name in FILMS else cast.title
    return picture(title, frames, cast.columns)


def last_mark(cast: Cast) -> Frame:
    return [frame(screen) for event, screen in cast.screens() if event.kind == "m"][-1]


def is_command(lines: Lines) -> bool:
    """Return True if a screen shows nothing but a command that is being typed: there is nothing to read yet."""
    return not lines or (len(lines) == 1 and lines[0].startswith(PROMPT.rstrip()))


def film(cast: Cast) -> list[Frame]:
    """The cast's screens from the first with more than the command up to its last mark, sped up, each long enough to be seen, and none for
    long.
    """
    end = max(event.seconds for event in cast.events if event.kind == "m")
    frames: list[Frame] = []
    shown: Frame | None = None
    since = 0.0
    for event, screen in cast.screens():
        if event.kind == "m" or event.seconds > end:
            continue
        if shown is None and is_command(lines_of(screen)):
            since = event.seconds
            continue
        passed = min((event.seconds - since) / SPEED, PAUSE_SECONDS)
        if shown is not None and passed >= FRAME_SECONDS:
            frames.append(Frame(round(passed, 2), shown.lines))
            since = event.seconds
        shown = frame(screen)
    return [*frames, Frame(END_SECONDS, shown.lines)] if shown else frames


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scenes", nargs="*", metavar="SCENE", help=f"default: all: {', '.join(SCENES)}")
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--anew", action="store_true", help="write what is recorded though its words are the same")
    parser.add_argument(
        "--draw", action="store_true", help="draw the recordings that are there, and record nothing; exit code 1: a picture has changed"
    )
    asked = parser.parse_args()
    unknown = sorted(set(asked.scenes) - set(SCENES))
    if unknown:
        parser.error(f"no such scene: {', '.join(unknown)}; there are {', '.join(SCENES)}")
    names = [name for name in SCENES if name in (asked.scenes or SCENES)]
    if asked.draw:
        changed = [draw(name, Cast.read(CASTS / f"{name}.cast"), is_check=asked.check) for name in names]
        return int(any(changed))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that a scene ends what it has started
    try:
        return record(names, is_check=asked.check, is_anew=asked.anew)
    except SceneError as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 1


def record(names: list[str], *, is_check: bool, is_anew: bool) -> int:
    changed = False
    needs_cluster = any(name not in WITHOUT_CLUSTER for name in names)
    with stage() as place, cluster(place) if needs_cluster else nullcontext():
        for name in [name for name in SCENES if name in names or (needs_cluster and name == FIRST_ON_CLUSTER)]:
            print(f"pictures: {name}", flush=True)
            cast = SCENES[name](place)
            if name in names:
                changed |= keep(name, cast, is_check=is_check, is_anew=is_anew)
    return int(changed)


def keep(name: str, cast: Cast, *, is_check: bool, is_anew: bool) -> bool:
    """Write the recording and its picture if its words have changed; return True if they have."""
    path = CASTS / f"{name}.cast"
    lines = difference(Cast.read(path) if path.is_file() else None, cast)
    if lines:
        print(f"pictures: {name} has changed; look at the pages that show it", *lines, sep="\n", flush=True)
    if (lines or is_anew) and not is_check:
        path.write_text(cast.text(), encoding="utf-8")
        draw(name, cast, is_check=False)
    return bool(lines)


def draw(name: str, cast: Cast, *, is_check: bool) -> bool:
    """Write the picture if it has changed; return True if it has."""
    path, now = PICTURES / f"{name}.svg", drawn(name, cast)
    is_new = not path.is_file() or path.read_text(encoding="utf-8") != now
    if is_new and not is_check:
        path.write_text(now, encoding="utf-8")
    return is_new


if __name__ == "__main__":
    sys.exit(main())
