"""Rows of tables (Parquet, Arrow, CSV, TSV), as streams: a file is never whole in memory, nor written a second time.

Parquet and Arrow are read by pyarrow, batch by batch. CSV is read by the standard library, since a reader that guesses types would make a
number of a text of digits, and nothing of a text that says NA.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from lockstep_spec.choices import ROW_KEYS
from lockstep_train.base.errors import ConfigError, first_line, refusal
from lockstep_train.data.read.meanings import NAMED
from lockstep_train.data.read.records import NO_COLUMNS, OF_FORMS, AnySample, object_of, sample_of
from lockstep_train.data.read.streams import ARROW, PARQUET, not_utf8, open_data, suffix_of
from lockstep_train.data.read.text_files import Broken, Form, usable

Row = dict[str, Any]
BATCH_ROWS = 1000
SEPARATORS = {".csv": ",", ".tsv": "\t"}


def read_table(
    path: Path, broken: Broken, form: Form, separator: str | None = None, columns: Mapping[str, str] = NO_COLUMNS
) -> Iterator[AnySample]:
    """Yield a sample for each row, rows counted from 1 as lines are.

    `separator`: of a CSV file that has another one than its name says. `columns`: our key → the table's. Raises ConfigError for a file that
    can't be read.
    """
    for number, row in enumerate(rows_of(path, separator, broken, columns), start=1):
        broken.at(number)
        yield from usable(form, object_of, row, number, broken)


def row_sample(row: Row, line: int, *, columns: Mapping[str, str]) -> AnySample | None:
    """Sample of a row; None for one that holds nothing. Raises ValueError."""
    keys = [columns.get(key, key) for key in OF_FORMS]
    return None if is_blank(row, keys) else sample_of({key: without_nulls(value) for key, value in row.items()}, line, columns=columns)


def rows_of(
    path: Path, separator: str | None = None, broken: Broken | None = None, columns: Mapping[str, str] = NO_COLUMNS
) -> Iterator[Row]:
    """Yield the rows of a table, of the columns that count; `broken` notes the others. Raises ConfigError for what is no such table."""
    wanted = {columns.get(key, key) for key in (*ROW_KEYS, *NAMED)}

    def chosen(names: Sequence[str]) -> list[str]:
        read = [name for name in names if name in wanted]
        (broken or Broken("")).pass_over(name for name in names if name not in wanted and columns.get(name) != "")
        return read if set(read) & {*OF_FORMS, *columns.values()} else list(names)  # a row's refusal names what it has

    suffix = suffix_of(path)
    with _readable(path), open_data(path) as file:
        if suffix == PARQUET:
            yield from _parquet_rows(file, chosen)
        elif suffix in ARROW:
            yield from _arrow_rows(file, chosen)
        else:
            yield from _cells(file, separator or SEPARATORS[suffix])


def parquet_row_count(path: Path) -> int:
    """Count of rows as the file's end has it, without reading them. Raises ConfigError."""
    import pyarrow.parquet

    with _readable(path), open_data(path) as file:
        return int(pyarrow.parquet.read_metadata(file).num_rows)


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise, for what the libraries raise, ConfigError, or TrainerError for a fault that may pass."""
    try:
        yield
    except (OSError, csv.Error, ValueError, OverflowError, NotImplementedError) as error:  # pyarrow's errors are of these kinds, too
        if isinstance(error, OSError) and error.errno is not None:
            raise refusal(f"the data {path} can't be read: {error.strerror}", error) from error
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"the data {path} is {not_utf8(error)}") from error
        kind = suffix_of(path).removeprefix(".")
        raise refusal(
            f"the data {path} can't be read as {kind}: {first_line(error)}; if it is cut off or damaged, copy or fetch it again", error
        ) from error


def _parquet_rows(file: BinaryIO, chosen: Callable[[Sequence[str]], list[str]]) -> Iterator[Row]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file, pre_buffer=False) as table:
        for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=chosen(table.schema_arrow.names)):
            yield from batch.to_pylist()


def _arrow_rows(file: BinaryIO, chosen: Callable[[Sequence[str]], list[str]]) -> Iterator[Row]:
    """Rows of a stream, as `datasets` saves it, or of an Arrow file."""
    import pyarrow

    magic = file.read(6)
    file.seek(0)
    reader: Any
    if magic == b"ARROW1":
        reader = pyarrow.ipc.open_file(file)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        batches = reader = pyarrow.ipc.open_stream(file)
    for batch in batches:
        read = batch.select(chosen(batch.schema.names))
        for first in range(0, read.num_rows, BATCH_ROWS):
            yield from read.slice(first, BATCH_ROWS).to_pylist()


def _cells(file: BinaryIO, separator: str) -> Iterator[Row]:
    """Yield rows whose cells are texts; an empty one is none. A blank line is no row."""
    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        lines = csv.reader(text, delimiter=separator, strict=True)
        header = next(lines, [])
        for cells in filter(None, lines):
            if len(cells) > len(header):
                raise csv.Error(f"line {lines.line_num} has {len(cells)} cells for {len(header)} columns")
            yield {name: cell or None for name, cell in itertools.zip_longest(header, cells)}


def is_blank(row: Row, keys: Iterable[str]) -> bool:
    """Return True if all of a row's columns that samples are made of are empty: text datasets have such a row for each empty line."""
    values = [row[key] for key in keys if key in row]
    return bool(values) and not any(value.strip() if isinstance(value, str) else value is not None for value in values)


def without_nulls(value: Any) -> Any:
    """Keep of an object all keys that have a value. Tables give each object of a column the keys of all of them, and a template would
    render those as if somebody had written null. What stands in a list keeps its place.
    """
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
