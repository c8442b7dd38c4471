"""Data that come as tables, compressed files, patterns and folders: the same samples as of JSON lines, read once and written nowhere
else.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from lockstep_spec.choices import ROW_KEYS, DataFormat
from lockstep_spec.training import EvaluationConfig, SamplesConfig, SourceConfig
from lockstep_train.base.errors import ConfigError
from lockstep_train.data.read.files import local_files
from lockstep_train.data.read.records import FORMS
from lockstep_train.data.read.splits import layout_of, split_names
from lockstep_train.data.read.text_files import Broken
from unit.train.data.data_cases import PLAIN_BYTES, dataset_of, text_of, write_jsonl

ROWS = [{"text": f"row {number}"} for number in range(20)]
PAIRS = [{"prompt": "a", "completion": "b", "text": None}, {"prompt": None, "completion": None, "text": "0123"}]


def write_parquet(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    return path


def write_stream(path: Path, rows: list[Any]) -> Path:
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return path


def write_feather(path: Path, rows: list[Any]) -> Path:
    pyarrow.feather.write_feather(pyarrow.Table.from_pylist(rows), str(path))
    return path


def write_cells(path: Path, rows: list[Any]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_zstd(path: Path, content: bytes) -> None:
    with pyarrow.CompressedOutputStream(pyarrow.OSFile(str(path), "wb"), "zstd") as file:
        file.write(content)


def texts(cache: Path, **data: Any) -> list[str]:
    return [text_of(example.ids) for example in dataset_of(cache, **data).training]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("x.parquet", write_parquet), ("x.PARQUET", write_parquet), ("x.arrow", write_stream), ("y.arrow", write_feather),
            ("x.feather", write_feather),
        ("x.csv", write_cells), ("x.tsv", write_cells),
    ],
)  # fmt: skip
def test_a_table_holds_the_samples_of_the_same_json_lines(tmp_path: Path, name: str, write: Callable[[Path, list[Any]], Path]) -> None:
    lines = write_jsonl(tmp_path / "x.jsonl", [{key: value for key, value in row.items() if value is not None} for row in PAIRS])
    table = dataset_of(tmp_path / "cache", path=str(write(tmp_path / name, PAIRS)))
    same = dataset_of(tmp_path / "cache", path=str(lines))
    for one, other in zip(table.training, same.training, strict=True):
        assert (one.ids.tolist(), one.labels.tolist()) == (other.ids.tolist(), other.labels.tolist())
    assert [example.source for example in table.training] == [f"{tmp_path / name}:1", f"{tmp_path / name}:2"]


WRITERS = (("x.jsonl", write_jsonl), ("x.parquet", write_parquet), ("x.arrow", write_stream), ("x.csv", write_cells))


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[name for name, _ in WRITERS])
def test_columns_of_other_names_are_read_for_ours_and_none_that_is_turned_off(
    tmp_path: Path, name: str, write: Callable[[Path, list[Any]], Path]
) -> None:
    rows = [{"Question": "q", "Answer": "a", "image": "a.jpg", "label": False, "prompt": "of its own"}] * 2
    source = SourceConfig(
        str(write(tmp_path / name, rows)), columns={"prompt": "Question", "completion": "Answer", "image": "", "label": ""}
    )
    broken = Broken("x")
    assert [(sample.prompt, sample.text) for sample in local_files(source, print).samples(broken)] == [("q", "a")] * 2  # type: ignore[union-attr]
    assert broken.count == 0 and broken.not_read() == ["Data: x: not read: `prompt`"]
    kept = SourceConfig(source.path, columns={"prompt": "Question", "completion": "Answer", "image": ""})
    assert list(local_files(kept, print).samples(broken)) == [] and "`label` is false" in broken.first[0].lower()
    texts_alone = SourceConfig(source.path, columns={"text": "Answer"}, format=DataFormat.TEXT)
    assert [sample.text for sample in local_files(texts_alone, print).samples(Broken("x"))] == ["a", "a"]  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[name for name, _ in WRITERS])
def test_a_key_that_changes_what_is_learned_is_refused_and_another_is_listed(
    tmp_path: Path, name: str, write: Callable[[Path, list[Any]], Path]
) -> None:
    rows = [{"prompt": "q", "completion": "a", "label": label, "source": "web"} for label in (True, False)]
    source, broken = SourceConfig(str(write(tmp_path / name, rows))), Broken("x")
    assert [sample.line for sample in local_files(source, print).samples(broken)] == [1]
    assert len(broken.first) == 1 and "x:2: `label` is false" in broken.first[0].lower()
    assert "`source`" in broken.not_read()[0]


def test_a_source_has_other_tokens_with_other_columns_and_says_at_every_start_what_it_does_not_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"one": "abc", "other": "xyz", "id": 1}])
    for column, text in (("one", "abc"), ("other", "xyz")):
        for _ in range(2):
            data = dataset_of(tmp_path / "cache", path=str(path), columns={"text": column})
            assert [text_of(example.ids) for example in data.training] == [text]
            left = "one" if column == "other" else "other"
            assert f"Data: {path}: not read: `{left}`, `id`" in data.notes


def test_a_form_that_columns_name_goes_before_one_that_a_row_has_itself(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"instruction": "q", "output": "a", "body": "all of it"}])
    assert texts(tmp_path / "cache", path=str(path), columns={"text": "body"}) == ["all of it"]


def test_the_keys_that_a_job_file_may_map_are_those_that_rows_are_read_by() -> None:
    assert {key for form, more in FORMS.items() for key in (*form, *more)} == set(ROW_KEYS)


def test_texts_of_digits_and_na_stay_texts_in_a_csv_file(tmp_path: Path) -> None:
    rows = [{"text": text} for text in ("007", "NA", "null", "1e3", "two\nlines", 'a "word"', "é")]
    path = write_cells(tmp_path / "x.csv", rows)
    assert texts(tmp_path / "cache", path=str(path)) == [row["text"] for row in rows]


def test_a_cell_of_messages_is_json(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write_cells(tmp_path / "x.csv", [{"messages": json.dumps(messages)}])
    sample = next(local_files(SourceConfig(str(path)), print).samples(Broken("x")))
    assert sample.messages == tuple(messages)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("suffix", "write"),
    [
        (".gz", lambda path, content: path.write_bytes(gzip.compress(content))),
        (".GZ", lambda path, content: path.write_bytes(gzip.compress(content))),
        (".bz2", lambda path, content: path.write_bytes(bz2.compress(content))),
        (".xz", lambda path, content: path.write_bytes(lzma.compress(content))),
        (".zst", write_zstd),
    ],
)
def test_compressed_files_are_read_as_they_are_and_refused_when_cut(
    tmp_path: Path, suffix: str, write: Callable[[Path, bytes], Any]
) -> None:
    content = write_jsonl(tmp_path / "x.jsonl", ROWS).read_bytes()
    path = tmp_path / f"y.jsonl{suffix}"
    write(path, content)
    assert texts(tmp_path / "cache", path=str(path)) == [row["text"] for row in ROWS]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ConfigError, match=r"y\.jsonl.* can't be read: its compressed content is cut off or damaged"):
        texts(tmp_path / "cut", path=str(path))


def test_compressed_plain_text_is_plain_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo"))
    assert texts(tmp_path / "cache", path=str(tmp_path / "x.txt.gz")) == ["one\n\ntwo"]


@pytest.mark.parametrize("format", DataFormat)
@pytest.mark.parametrize(
    ("name", "suffix"), [("x.zip", ".zip"), ("x.tar.gz", ".tar"), ("x.TAR", ".tar"), ("x.tgz", ".tgz"), ("x.7z", ".7z"), ("x.rar", ".rar")]
)
def test_an_archive_is_refused(tmp_path: Path, name: str, suffix: str, format: DataFormat) -> None:
    (tmp_path / name).write_text("text")
    with pytest.raises(ConfigError, match=rf"{re.escape(name)} is an archive \({suffix}\); unpack it"):
        texts(tmp_path / "cache", path=str(tmp_path / name), format=format)


@pytest.mark.parametrize(
    ("path", "files", "reason"),
    [
        *((name, {name: ""}, rf"{re.escape(name)} is a compressed \.\w+ file, .*; decompress it")
            for name in ("x.parquet.gz", "x.arrow.xz", "x.feather.zst")),
        ("x.csv", {"x.csv": "text\na\nb,c\n"}, r"x\.csv can't be read as csv: line 3 has 2 cells for 1 columns"),
        ("x.bin", {"x.bin": "a\n\n\0\1\n\nb"}, r"1 broken lines in the data: .*x\.bin:3: not text: it holds a NUL byte"),
        ("*.jsonl", {"a.jsonl": '{"text": "a"}\n' * 3, "b.jsonl": '{"text": "x"}\n{"text": 1}\n'}, r"\*\.jsonl:5: `text` is not a string"),
        ("*.jsonl", {"a.jsonl": '{"text": "a"}\n\n\n', "b.jsonl": '{"text": 1}\n'}, r"\*\.jsonl:4: `text` is not a string"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_refused_with_the_place_counted_through_all(
    tmp_path: Path, path: str, files: dict[str, str], reason: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=reason):
        texts(tmp_path / "cache", path=str(tmp_path / path))


@pytest.mark.parametrize("kept", [0, 4, -1])
def test_a_parquet_file_that_is_cut_off_is_refused_by_its_name(tmp_path: Path, kept: int) -> None:
    path = write_parquet(tmp_path / "x.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(
        ConfigError, match=r"the data .*x\.parquet can't be read as parquet: .*; if it is cut off or damaged, copy or fetch it again"
    ):
        texts(tmp_path / "cache", path=str(path))


def test_rows_without_text_are_left_out_and_counted_and_other_broken_rows_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"text": text} for text in ("", " a ", "\n", "b")])
    for _ in range(2):
        dataset = dataset_of(tmp_path / "cache", path=str(path))
        assert [text_of(example.ids) for example in dataset.training] == [" a ", "b"]
        assert f"Data: {path}: left out 2 blank rows" in dataset.notes
    other = write_parquet(tmp_path / "y.parquet", [{"text": "a", "prompt": "x"}, {"text": None, "prompt": "y"}])
    with pytest.raises(ConfigError, match=r"1 broken lines in the data: .*y\.parquet:2: "):
        texts(tmp_path / "cache", path=str(other))


@pytest.mark.parametrize(("name", "write"), [("x.csv", write_cells), ("x.parquet", write_parquet)])
def test_a_row_whose_columns_are_empty_is_left_out_and_counted(tmp_path: Path, name: str, write: Callable[[Path, list[Any]], Path]) -> None:
    rows = [{"text": None, "label": "1"}, {"text": "a", "label": "2"}, {"text": None, "label": "3"}]
    dataset = dataset_of(tmp_path / "cache", path=str(write(tmp_path / name, rows)))
    assert [text_of(example.ids) for example in dataset.training] == ["a"]
    assert f"Data: {tmp_path / name}: left out 2 blank rows" in dataset.notes
    pairs = [{"instruction": None, "output": None, "text": None}, {"instruction": None, "output": None, "text": "a"}]
    assert texts(tmp_path / "cache", path=str(write(tmp_path / f"pairs-{name}", pairs))) == ["a"]


def test_data_of_nothing_but_blank_rows_are_refused_with_their_number(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"text": ""}, {"text": None}])
    with pytest.raises(ConfigError, match=r"x\.parquet holds no samples; Data: .*x\.parquet: left out 2 blank rows"):
        texts(tmp_path / "cache", path=str(path))


def test_a_blank_line_of_a_csv_file_is_no_row(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text\na\n\nb\n\n")
    found = dataset_of(tmp_path / "cache", path=str(tmp_path / "x.csv"))
    assert [example.source for example in found.training] == [f"{tmp_path / 'x.csv'}:{number}" for number in (1, 2)]
    assert not any("blank rows" in note for note in found.notes)


@pytest.mark.parametrize(("name", "write"), [("x.csv", write_cells), ("x.parquet", write_parquet)])
def test_a_question_without_its_answer_is_broken_though_the_row_has_a_text(
    tmp_path: Path, name: str, write: Callable[[Path, list[Any]], Path]
) -> None:
    rows = [{"instruction": "add", "output": output, "text": "### add"} for output in ("x", None)]
    broken = Broken("x")
    assert len(list(local_files(SourceConfig(str(write(tmp_path / name, rows))), print).samples(broken))) == 1
    assert broken.first == ["x:2: `output` has no value"]


def test_columns_that_no_sample_is_made_of_are_not_read(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a"], "time": pyarrow.array([9 * 10**18], pyarrow.timestamp("us"))})  # no datetime has that year
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    pyarrow.feather.write_feather(table, str(tmp_path / "x.arrow"))
    for name in ("x.parquet", "x.arrow"):
        assert texts(tmp_path / "cache", path=str(tmp_path / name)) == ["a"]


def test_a_value_that_python_has_no_form_for_is_refused_with_the_file(tmp_path: Path) -> None:
    calls = [{"role": "user", "content": "a", "time": 9 * 10**18}]
    kind = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string()), ("time", pyarrow.timestamp("us"))]))
    pyarrow.parquet.write_table(pyarrow.table({"messages": pyarrow.array([calls], kind)}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=r"x\.parquet can't be read as parquet: "):
        texts(tmp_path / "cache", path=str(tmp_path / "x.parquet"))


def test_rows_of_a_table_become_paragraphs_where_the_format_is_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "x.parquet", [{"text": text} for text in (" = A = \n", "", "one \n", "two\n")])
    dataset = dataset_of(tmp_path / "cache", PLAIN_BYTES, path=str(path), format=DataFormat.TEXT)
    assert [text_of(example.ids) for example in dataset.training] == [" = A =\n\none\n\ntwo"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_lines_of_json_become_paragraphs_where_the_format_is_text(tmp_path: Path, name: str) -> None:
    rows = [{"text": "one\n", "url": "u"}, {"text": ""}, {"text": "two"}]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / name).write_text(lines if name == "x.jsonl" else json.dumps(rows))
    dataset = dataset_of(tmp_path / "cache", PLAIN_BYTES, path=str(tmp_path / name), format=DataFormat.TEXT)
    assert [text_of(example.ids) for example in dataset.training] == ["one\n\ntwo"]
    assert f"Data: {tmp_path / name}: left out 1 blank rows" in dataset.notes


def test_a_row_without_text_is_broken_where_the_format_is_text(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}]
    for path in (write_jsonl(tmp_path / "x.jsonl", rows), write_parquet(tmp_path / "x.parquet", rows)):
        with pytest.raises(ConfigError, match=rf"{path.name}:1: there is no `text`"):
            texts(tmp_path / "cache", path=str(path), format=DataFormat.TEXT)


def test_a_table_is_read_batch_by_batch(tmp_path: Path) -> None:
    """Whoever takes three rows of ten million has not decoded the others."""
    path = tmp_path / "x.parquet"
    with pyarrow.parquet.ParquetWriter(path, pyarrow.schema([("text", pyarrow.string())]), compression="zstd") as writer:
        part = pyarrow.table({"text": ["x" * 1000] * 10_000})
        for _ in range(20):
            writer.write_table(part)
    before = pyarrow.total_allocated_bytes()
    samples = local_files(SourceConfig(str(path)), print).samples(Broken("x"))
    for _ in range(3):
        next(samples)
    assert pyarrow.total_allocated_bytes() - before < 50e6  # all of it is 200 MB
    samples.close()  # type: ignore[attr-defined]


def test_the_files_of_a_pattern_are_read_in_the_order_of_their_names_and_rows_counted_through(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d/b.parquet", ROWS[4:6])
    write_parquet(tmp_path / "d/a.parquet", ROWS[:4])
    write_jsonl(tmp_path / "d/c.jsonl", ROWS[6:])
    (tmp_path / "d/about.md").write_text("about")
    pattern = str(tmp_path / "d/*.*[tl]")
    dataset = dataset_of(tmp_path / "cache", path=pattern)
    assert [text_of(example.ids) for example in dataset.training] == [row["text"] for row in ROWS]
    assert [example.source for example in dataset.training] == [f"{pattern}:{number}" for number in range(1, 21)]
    assert dataset.files.keys() == {pattern}
    write_parquet(tmp_path / "d/b.parquet", ROWS[4:5])
    assert dataset_of(tmp_path / "cache", path=pattern).files[pattern] != dataset.files[pattern]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nothing-*.parquet", "no file matches the pattern .*nothing-"),
        ("*", "is plain text and .* is not; name them as two sources"),
        ("empty", "the folder .*empty has no data files that can be read"),
        ("pictures", "the folder .*pictures holds imagefolder files; Parquet"),
    ],
)
def test_a_path_without_data_is_refused(tmp_path: Path, path: str, reason: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.txt").write_text("b")
    for name in ("empty", "pictures"):
        (tmp_path / name).mkdir()
    (tmp_path / "pictures/a.png").touch()
    with pytest.raises(ConfigError, match=reason):
        texts(tmp_path / "cache", path=str(tmp_path / path))


def read_texts(path: Path, told: list[str] | None = None) -> list[str]:
    samples = local_files(SourceConfig(str(path)), (told if told is not None else []).append).samples(Broken("x"))
    return [sample.text for sample in samples]  # type: ignore[union-attr]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two visible files and hidden ones of every kind, each with its name as the text."""
    for name in ("a.jsonl", "b/__c.jsonl", ".d.jsonl", ".e/f.jsonl", "__g/h.jsonl", "b/.i/j.jsonl", "lost+found/k.jsonl"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / "tree" / name, [{"text": name}])
    return tmp_path / "tree"


def test_hidden_files_are_taken_neither_of_a_folder_nor_by_a_pattern_that_doesnt_name_them(tree: Path) -> None:
    assert read_texts(tree) == read_texts(tree / "**/*.jsonl") == read_texts(tree / "**") == ["a.jsonl", "b/__c.jsonl"]
    assert read_texts(tree / "*.jsonl") == ["a.jsonl"]
    assert read_texts(tree / "*/*.jsonl") == ["b/__c.jsonl"]
    assert read_texts(tree / ".*.jsonl") == [".d.jsonl"]
    assert read_texts(tree / "*/.i/*.jsonl") == read_texts(tree / "**/.i/*.jsonl") == read_texts(tree / "b/.i/*") == ["b/.i/j.jsonl"]
    with pytest.raises(ConfigError, match=r"no file matches the pattern .*/\*e/\* but 1 hidden ones"):
        read_texts(tree / "*e/*")


def test_links_to_folders_are_followed_once_and_loops_end(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    for path, text in ((folder / "v1/a.jsonl", "a"), (folder / ".store/b.jsonl", "b"), (tmp_path / "far/c.jsonl", "c")):
        path.parent.mkdir(parents=True)
        write_jsonl(path, [{"text": text}])
    for place, target in (
        (folder / "latest", folder / "v1"),
        (folder / "loop", folder),
        (folder / "up", tmp_path),
        (folder / "z-store", folder / ".store"),
        (folder / "z-far", tmp_path / "far"),
        (tmp_path / "far/back", folder),
        (tmp_path / "far/again", tmp_path / "far"),
    ):
        place.symlink_to(target)
    assert read_texts(folder) == read_texts(folder / "**/*.jsonl") == ["a", "c", "b"]


def test_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    for path in (tmp_path, tmp_path / "*.jsonl"):
        with pytest.raises(ConfigError, match=r"b\.jsonl can't be read: No such file"):
            read_texts(path)


def test_a_pattern_that_python_refuses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the pattern .*\*\*\.jsonl is not valid: "):
        read_texts(tmp_path / "**.jsonl")


def test_files_of_a_folder_that_are_left_out_are_told(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "F.JSONL", "notes.txt", "c.parquet", "state.json", "dataset_info.json", "about.md"):
        write_jsonl(tmp_path / name, [{"text": name}])
    told: list[str] = []
    assert read_texts(tmp_path, told) == ["a.jsonl", "b.jsonl"]
    assert told[0].startswith(
        f"WARNING: the folder {tmp_path}: left out 2 files that look like data and are of no split: F.JSONL, c.parquet; "
    )
    for name in ("F.JSONL", "c.parquet"):
        (tmp_path / name).unlink()
    told.clear()
    read_texts(tmp_path, told)
    assert len(told) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, rows in (("train", ROWS[:10]), ("validation", ROWS[10:14]), ("test", ROWS[14:])):
        for shard in range(2):
            write_parquet(tmp_path / f"d/data/{split}-{shard:05}-of-00002.parquet", rows[shard::2])
    (tmp_path / "d/.git").mkdir()
    (tmp_path / "d/.git/x.parquet").touch()
    return tmp_path / "d"


def test_a_folder_is_divided_into_splits_by_its_names(folder: Path, tmp_path: Path) -> None:
    train = [row["text"] for row in (*ROWS[:10:2], *ROWS[1:10:2])]
    assert texts(tmp_path / "cache", path=str(folder)) == train
    assert texts(tmp_path / "cache", path=str(folder), split="validation") == ["row 10", "row 12", "row 11", "row 13"]
    assert texts(tmp_path / "cache", path=str(folder), split="train[:3]") == train[:3]
    assert texts(tmp_path / "cache", path=str(folder), split="train[-40%:]+test[2:5]") == [*train[6:], "row 18", "row 15", "row 17"]
    with pytest.raises(ConfigError, match=r"the folder .*d has no split eval; it has test, train, validation"):
        texts(tmp_path / "cache", path=str(folder), split="eval")
    with pytest.raises(ConfigError, match=r"the split train\[:120%\] is not available: .*; there are 10 rows in train"):
        texts(tmp_path / "cache", path=str(folder), split="train[:120%]")


def test_rows_of_a_part_of_a_split_are_counted_as_in_the_whole(folder: Path, tmp_path: Path) -> None:
    found = dataset_of(tmp_path / "cache", path=str(folder), split="train[4:7]").training
    assert [example.source for example in found] == [f"{folder}:{number}" for number in (5, 6, 7)]


def test_parts_of_plain_text_are_of_its_lines_and_together_the_whole(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for shard in range(2):
        (tmp_path / f"d/train-{shard}.txt").write_text("".join(f"{shard} {line}\n" for line in range(10)))

    def lines(split: str) -> list[str]:
        found = local_files(SourceConfig(str(tmp_path / "d"), split=split), print).samples(Broken("x"))
        return [line for sample in found for line in sample.text.split("\n")]  # type: ignore[union-attr]

    whole = lines("train")
    assert len(whole) == 20
    assert (lines("train[:50%]"), lines("train[50%:]")) == (whole[:10], whole[10:])
    assert (lines("train[:12]"), lines("train[12:]")) == (whole, [])  # a paragraph is of the part in which it begins


@pytest.mark.parametrize("name", ["a.jsonl", "*.jsonl"])
def test_a_part_of_files_is_taken_of_all_their_rows(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    path = str(tmp_path / name)
    assert texts(tmp_path / "cache", path=path, split="train[5:10]") == [row["text"] for row in ROWS[5:10]]
    assert len(texts(tmp_path / "cache", path=path, split="train[:50%]")) == 10
    assert len(texts(tmp_path / "cache", path=path)) == 20


def test_a_split_that_files_dont_have_is_ignored_and_told(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    told: list[str] = []
    dataset = dataset_of(tmp_path / "cache", told=told, path=str(path), split="validation")
    assert len(dataset.training) == 20
    assert told[0] == f"WARNING: split validation is ignored: {path} has all rows in train; only folders and hub datasets have splits"


def test_samples_for_evaluation_are_of_the_validation_split_or_of_the_only_one(folder: Path, tmp_path: Path) -> None:
    def evaluated(path: Path, split: str | None = None) -> set[str]:
        own = EvaluationConfig(1, 0.1, 100, SamplesConfig(str(path), split=split))
        return {text_of(example.ids) for example in dataset_of(tmp_path / "cache", evaluation=own, path=str(folder)).evaluation}

    assert evaluated(folder) == {f"row {number}" for number in range(10, 14)}
    assert evaluated(folder, "test") == {f"row {number}" for number in range(14, 20)}
    write_parquet(tmp_path / "own/some.parquet", ROWS[:2])
    assert evaluated(tmp_path / "own") == {"row 0", "row 1"}


def test_a_folder_saved_by_datasets_is_read(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert texts(tmp_path / "cache", path=str(tmp_path / "saved")) == [row["text"] for row in ROWS]


CARD = b"""---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/train*
  - split: test
    path: small/test*
- config_name: other
  data_files: "other/*"
---
"""
CELLS = b"""---
configs:
- config_name: cells
  sep: "|"
  data_files: "cells/*.csv"
---
"""
NAMES = ["README.md", "small/train.jsonl", "small/test.jsonl", "large/train.jsonl", "other/a.jsonl"]


def test_configs_are_those_of_the_readme() -> None:
    layout = layout_of("the folder /x", NAMES, CARD, "small")
    assert dict(layout.splits) == {"train": ("small/train.jsonl",), "test": ("small/test.jsonl",)}
    with pytest.raises(ConfigError, match="the folder /x has several configs; set config to other, small"):
        layout_of("the folder /x", NAMES, CARD, None)
    with pytest.raises(ConfigError, match="the folder /x has no config large; it has other, small"):
        layout_of("the folder /x", NAMES, CARD, "large")


def test_a_folder_without_a_readme_has_its_folders_as_configs() -> None:
    assert dict(layout_of("the folder /x", NAMES[1:4], None, "small").splits) == {
        "train": ("small/train.jsonl",),
        "test": ("small/test.jsonl",),
    }


def test_the_separator_of_a_config_is_used(tmp_path: Path) -> None:
    (tmp_path / "d/cells").mkdir(parents=True)
    (tmp_path / "d/README.md").write_bytes(CELLS)
    (tmp_path / "d/cells/a.csv").write_text("text|note\na,b|x\n")
    assert texts(tmp_path / "cache", path=str(tmp_path / "d")) == ["a,b"]


@pytest.mark.parametrize("split", ["", "train[", "train]", "train[:1]x", "../x", "a+"])
def test_a_split_that_cant_be_understood_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match="can't be understood; write train, "):
        split_names(split)
