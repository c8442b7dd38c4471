"""The samples of one or many files: of a path, a pattern, or the splits of a folder. Files are read in the order of their names, one after
the other, and lines or rows are counted through all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lockstep_spec.choices import DataFormat
from lockstep_spec.training import SamplesConfig
from lockstep_train.base.errors import ConfigError, first_line, refusal
from lockstep_train.base.limits import Say
from lockstep_train.data.read.records import NO_COLUMNS, AnySample, sample_of
from lockstep_train.data.read.splits import CARD, DatasetLayout, layout_of, left_out, one_of, split_names
from lockstep_train.data.read.streams import JSON, PARQUET, TABLES, suffix_of
from lockstep_train.data.read.tables import parquet_row_count, read_table, row_sample
from lockstep_train.data.read.text_files import Broken, is_plain_text, paragraph_of, read_jsonl, read_text, refuse_packed

WILD = set("*?[")
ALL = "train"
"""The split of files that aren't divided into any."""
Reader = Callable[[Path, Broken], Iterator[AnySample]]


@dataclass(frozen=True)
class RowRange:
    """Rows of some files."""

    paths: tuple[Path, ...]
    start: int = 0
    """Rows before it that are left out."""
    end: int | None = None
    """Rows up to and without this one; None: all."""


@dataclass(frozen=True)
class DataFiles:
    """Files that one source is read from."""

    parts: tuple[RowRange, ...]
    plain_text: bool
    """Paragraphs that may be joined; else every sample stands for itself."""
    separator: str | None = None
    """Separator of CSV files that have another one than a comma."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our key → the rows' key, where they differ."""

    @property
    def paths(self) -> list[Path]:
        return [path for part in self.parts for path in part.paths]

    @property
    def is_whole(self) -> bool:
        """All rows of all files, each once."""
        return len(self.parts) == 1 and (self.parts[0].start, self.parts[0].end) == (0, None)

    def samples(self, broken: Broken) -> Iterator[AnySample]:
        """All samples. Raises ConfigError for a file that can't be read."""
        before = 0
        for part in self.parts:
            before += yield from _samples_of(part, reader_of(self.plain_text, self.separator, self.columns), broken, before)

    def digest(self, of: Callable[[Path], str]) -> str:
        """Digest over the contents and which rows of them are read; of one whole file its own."""
        contents = [of(path) for path in self.paths]
        chosen = [[part.start, part.end, len(part.paths)] for part in self.parts]
        if len(contents) == 1 and chosen == [[0, None, 1]] and self.separator is None and not self.columns:
            return contents[0]
        facts = [contents, chosen, self.separator, *([self.columns] if self.columns else [])]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class DataSource:
    """One source of samples."""

    name: str
    """Name in messages: the file, or the hub dataset with its split."""
    digest: str
    """Digest of the content."""
    plain_text: bool
    """Paragraphs that may be joined; else every sample stands for itself."""
    weight: float
    samples: Callable[[Broken], Iterator[AnySample]]
    pinned: str = ""
    """Name in a manifest: the path, or the hub dataset with its commit."""


def reader_of(plain_text: bool, separator: str | None, columns: Mapping[str, str] = NO_COLUMNS) -> Reader:
    """Reader of a file, by its name and by whether its texts are paragraphs."""
    form, of_row = (partial(form, columns=columns) for form in ((paragraph_of,) * 2 if plain_text else (sample_of, row_sample)))

    def read(path: Path, broken: Broken) -> Iterator[AnySample]:
        suffix = suffix_of(path)
        if suffix in TABLES:
            return read_table(path, broken, of_row, separator, columns)
        if suffix in JSON or not plain_text:
            return read_jsonl(path, broken, form)
        return read_text(path, broken)

    return read


class _Through(Broken):
    """Counter of lines or rows through the files of a part, which passes on what is broken in those that are read."""

    def __init__(self, whole: Broken, part: RowRange, offset: int) -> None:
        super().__init__(whole.name)
        self._whole = whole
        self._part = part
        self._offset = offset
        """Rows of the parts before."""
        self.before = 0
        """Rows of the files before."""
        self.last = 0
        """The last row that was read of the file at hand."""

    def at(self, line: int) -> None:
        self.last = line

    def number(self, line: int) -> int | None:
        """Number that stands for a row of this file; None for one that is left out."""
        row = self.before + line
        return self._offset + row if row > self._part.start and (self._part.end is None or row <= self._part.end) else None

    def add(self, line: int, reason: str) -> None:
        number = self.number(line)
        if number is not None:
            self._whole.add(number, reason)

    def skip(self, line: int) -> None:
        number = self.number(line)
        if number is not None:
            self._whole.skip(number)

    def pass_over(self, keys: Iterable[str]) -> None:
        self._whole.pass_over(keys)

    def next_file(self) -> None:
        self.before, self.last = self.before + self.last, 0

    @property
    def is_done(self) -> bool:
        return self._part.end is not None and self.before + self.last >= self._part.end


def _samples_of(part: RowRange, read: Reader, broken: Broken, offset: int) -> Generator[AnySample, None, int]:
    """Yield the samples of a part; return how many lines or rows were gone through."""
    through = _Through(broken, part, offset)
    for path in part.paths:
        for sample in read(path, through):
            number = through.number(sample.line)
            if number is not None:
                yield sample if number == sample.line else replace(sample, line=number)
            if through.is_done:
                break
        through.next_file()
        if through.is_done:
            break
    return through.before


def row_count(paths: Sequence[Path], read: Reader) -> int:
    """Rows of tables, objects of arrays, or lines. Raises ConfigError."""
    if all(path.suffix.casefold() == PARQUET for path in paths):
        return sum(map(parquet_row_count, paths))
    ignored = _samples_of(RowRange(tuple(paths)), read, Broken(""), 0)
    while True:
        try:
            next(ignored)
        except StopIteration as end:
            return int(end.value)


def is_several(path: Path) -> bool:
    """Return True if a path means several files: a folder, or a pattern with *, ? or [ in it."""
    return path.is_dir() or bool(WILD & set(str(path)) and not path.exists())


def local_files(source: SamplesConfig, say: Say) -> DataFiles:
    """Files of `source.path`: a file, a pattern or a folder. Raises ConfigError, or TrainerError for a volume that may answer later."""
    path = Path(source.path or "")
    if not is_several(path):
        return rows_of_files([path], source, say)
    try:
        if path.is_dir():
            return folder_files(path, source, say)
        matches = pattern_files(path)
    except OSError as error:
        raise refusal(
            f"{error.filename or path}, of the data {path}, can't be read: {error.strerror or first_line(error)}", error
        ) from error
    say(f"Data: {path}: {len(matches):,} files")
    return rows_of_files(matches, source, say)


def pattern_files(pattern: Path) -> list[Path]:
    """Files that match a pattern, in the order of their names. Hidden ones match where a part of the pattern begins as they do. Raises
    ConfigError and OSError.
    """
    count = next(number for number, part in enumerate(pattern.parts) if WILD & set(part))
    top, parts = Path(*pattern.parts[:count]), pattern.parts[count:]
    try:
        matches = {match for match in _matches(top, parts) if _is_file(match)}
    except ValueError as error:
        raise ConfigError(f"the pattern {pattern} is not valid: {first_line(error)}") from error
    names_hidden = any(part.startswith((".", "__")) for part in parts)
    hidden = set() if names_hidden else {match for match in matches if _is_hidden(match.relative_to(top))}
    if not matches - hidden:
        but = f" but {len(hidden):,} hidden ones (.name, or in .folder or __folder)" if hidden else ""
        raise ConfigError(f"no file matches the pattern {pattern}{but}; every node must see the files there")
    return sorted(matches - hidden)


def _matches(top: Path, parts: tuple[str, ...]) -> Iterator[Path]:
    if "**" not in parts:
        yield from top.glob(str(Path(*parts)))
        return
    place = parts.index("**")
    for start in top.glob(str(Path(*parts[:place]))) if place else [top]:
        for folder in folders_of(start) if start.is_dir() else ():
            yield from _matches(folder, parts[place + 1 :] or ("*",))


def folders_of(folder: Path, walked: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The folder and those below it, but hidden ones. A link is followed unless it leads to where the walk comes anyway: loops end so, and
    nothing is read twice. Raises OSError.
    """
    walked = walked or (folder.resolve(),)
    yield folder
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not _is_hidden(Path(child.name, "x")):
            target = child.resolve()
            if not child.is_symlink():
                yield from folders_of(child, walked)
            elif not any(_comes_to(target, root) for root in walked):
                yield from folders_of(child, (*walked, target))


def _comes_to(target: Path, root: Path) -> bool:
    """Return True if a walk from the root comes to the target, or one from the target to the root."""
    return root.is_relative_to(target) or (target.is_relative_to(root) and not _is_hidden(target.relative_to(root) / "x"))


def rows_of_files(paths: Sequence[Path], source: SamplesConfig, say: Say) -> DataFiles:
    """All rows of files that aren't divided into splits, or the part of them that `train[…]` takes. Raises ConfigError."""
    files = replace(whole_files(paths, source.format), columns=source.columns or {})
    split = source.split or ALL
    if set(split_names(split)) != {ALL}:
        say(f"WARNING: split {split} is ignored: {source.path} has all rows in {ALL}; only folders and hub datasets have splits")
        return files
    return replace(files, parts=tuple(_parts(split, {ALL: tuple(paths)}, reader_of(files.plain_text, None))))


def whole_files(paths: Sequence[Path], format: DataFormat) -> DataFiles:
    """All rows of these files. Raises ConfigError where some are plain text and others are not."""
    for path in paths:
        refuse_packed(path)
    texts = [path for path in paths if (is_plain_text(path) if format is DataFormat.AUTO else format is DataFormat.TEXT)]
    if texts and len(texts) < len(paths):
        other = next(path for path in paths if path not in texts)
        raise ConfigError(f"{texts[0]} is plain text and {other} is not; name them as two sources (data.sources), or state their format")
    return DataFiles((RowRange(tuple(paths)),), bool(texts))


def folder_files(folder: Path, source: SamplesConfig, say: Say) -> DataFiles:
    """Files of a split of a folder. Raises ConfigError and OSError."""
    files = [path for below in folders_of(folder) for path in below.iterdir() if _is_file(path) and not _is_hidden(Path(path.name))]
    names = sorted(str(path.relative_to(folder)) for path in files)
    card = (folder / CARD).read_bytes() if CARD in names else None
    layout = layout_of(f"the folder {folder}", names, card, source.config)
    for line in left_out(layout, names):
        say(line)
    return split_files(layout, folder, source, say)


def _is_file(path: Path) -> bool:
    """Return True for a file, also for a link to nothing: it is refused when it is read, and no data are missed."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def _is_hidden(file: Path) -> bool:
    """Return True for a hidden file, by its path below what was asked for; so is what a file system lost and found."""
    folders = file.parent.parts
    return any(part.startswith(".") for part in file.parts) or any(part.startswith("__") or part == "lost+found" for part in folders)


def split_files(layout: DatasetLayout, root: Path, source: SamplesConfig, say: Say) -> DataFiles:
    """Files of the source's split, which may be a part of one or several together. Raises ConfigError."""
    split = source.split or default_split(layout)
    paths = {name: tuple(root / file for file in layout.files(name)) for name in split_names(split)}
    everything = [path for files in paths.values() for path in files]
    plain_text = whole_files(everything, source.format).plain_text
    say(f"Data: {root}: split {split} of {one_of(layout.splits)}, {len(everything):,} files")
    parts = _parts(split, paths, reader_of(plain_text, layout.separator))
    return DataFiles(tuple(parts), plain_text, layout.separator, source.columns or {})


def default_split(layout: DatasetLayout) -> str:
    """Split for evaluation, where none is stated: validation, or the only one there is."""
    return next(iter(layout.splits)) if len(layout.splits) == 1 else "validation"


def _parts(split: str, paths: Mapping[str, tuple[Path, ...]], read: Reader) -> Iterator[RowRange]:
    if "[" not in split:
        yield from (RowRange(paths[name]) for name in split_names(split))
        return
    import datasets

    counts = {name: row_count(files, read) for name, files in paths.items()}
    try:
        chosen = datasets.ReadInstruction.from_spec(split).to_absolute(counts)
    except (ValueError, AssertionError) as error:
        rows = ", ".join(f"{count:,} rows in {name}" for name, count in counts.items())
        raise ConfigError(f"the split {split} is not available: {first_line(error)}; there are {rows}") from error
    for part in chosen:
        start = part.from_ or 0
        yield RowRange(paths[part.splitname], start, part.to if part.to is not None else counts[part.splitname])
