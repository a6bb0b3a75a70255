"""Damage to a record file: found, named, and never read as data; everything before it stays readable."""

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.carriers import records
from schemas.carriers.records import Problem, Record, RecordFile, RecordReader
from schemas.errors import LogCorrupt, LogError

HEADER = {"run": "01J", "logic": "1"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "log.sqlite"


def record(position: int) -> Record:
    """The record that the tests put at a position, of several sizes."""
    return Record(position, 1_000 + position, "issued", f"{position % 5}.0", bytes([position % 251]) * (position % 160))


def made(path: Path, upto: int) -> Path:
    with RecordFile.open(path, HEADER) as file:
        for position in range(1, upto + 1):
            one = record(position)
            file.append(one.kind, one.agent, one.at_ns, one.body)
    return path


def altered(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()


def readable(path: Path) -> tuple[list[Record], LogCorrupt | None]:
    """What can be read of the file, and the damage that ended it."""
    found: list[Record] = []
    try:
        with RecordReader.open(path) as reader:
            found.extend(one for one in reader.records())
    except LogCorrupt as error:
        return found, error
    return found, None


def test_a_changed_record_ends_reading_after_all_before_it_and_is_named(path: Path) -> None:
    made(path, 500)
    altered(path, "UPDATE records SET at_ns = at_ns + 1 WHERE position IN (400, 450)")
    found, error = readable(path)
    assert found == [record(position) for position in range(1, 400)]
    assert error is not None and error.position == 400
    assert str(path) in str(error) and "record 400" in str(error) and "Records 1 to 399 are readable" in str(error)
    with RecordReader.open(path) as reader:
        assert [problem.position for problem in reader.verify()] == [400, 450]
        assert len(list(reader.records(start=451))) == 50


@pytest.mark.parametrize("column", ["position", "at_ns", "kind", "agent", "body", "checksum"])
def test_the_checksum_covers_every_column(path: Path, column: str) -> None:
    made(path, 20)
    change = {
        "position": "position = -position",
        "kind": "kind = kind || 'x'",
        "agent": "agent = '9'",
        "body": "body = CAST(body || 'x' AS BLOB)",
    }.get(column, f"{column} = {column} + 1")
    altered(path, f"UPDATE records SET {change} WHERE position = 20")
    found, error = readable(path)
    assert len(found) == 19
    assert error is not None and error.position == 20


@pytest.mark.parametrize("value", ["NULL", "7", "'text'", "CAST(x'ff' AS TEXT)", "zeroblob(100)"])
@pytest.mark.parametrize("column", ["body", "kind", "at_ns", "checksum"])
def test_a_value_of_another_type_is_damage(path: Path, column: str, value: str) -> None:
    made(path, 20)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')")
    connection.close()
    altered(path, f"UPDATE records SET {column} = {value} WHERE position = 20")
    found, error = readable(path)
    assert len(found) == 19
    assert error is not None and error.position == 20


def test_a_hole_is_named_and_verify_goes_on_behind_it(path: Path) -> None:
    made(path, 50)
    altered(path, "DELETE FROM records WHERE position IN (1, 30)")
    found, error = readable(path)
    assert found == []
    assert error is not None and error.position == 1 and "No record before it" in str(error)
    with RecordReader.open(path) as reader:
        assert [problem.position for problem in reader.verify()] == [1, 30]
        assert [one.position for one in reader.records(start=31)] == list(range(31, 51))


def test_a_missing_end_is_found_by_reader_verifier_and_writer(path: Path) -> None:
    made(path, 50)
    altered(path, "DELETE FROM records WHERE position > 40")
    found, error = readable(path)
    assert len(found) == 40
    assert error is not None and error.position == 41
    with RecordReader.open(path) as reader:
        assert [problem.position for problem in reader.verify()] == [41]
    with pytest.raises(LogCorrupt, match="ends with 40"):
        RecordFile.open(path)


def test_verify_gives_up_after_a_bounded_number_of_problems(path: Path) -> None:
    made(path, 500)
    altered(path, "UPDATE records SET checksum = checksum + 1")
    with RecordReader.open(path) as reader:
        problems = reader.verify()
    assert len(problems) == records.PROBLEMS_MAX
    assert problems[0] == Problem(1, problems[0].what)


def test_a_damaged_header_is_reported_and_the_records_stay_readable(path: Path) -> None:
    made(path, 20)
    altered(path, "UPDATE meta SET value = '2' WHERE key = 'logic'")
    with RecordReader.open(path) as reader:
        with pytest.raises(LogCorrupt, match="header does not match"):
            _ = reader.header
        assert [problem.position for problem in reader.verify()] == [0]
        assert len(list(reader.records())) == 20


def test_damaged_bounds_are_damage(path: Path) -> None:
    made(path, 20)
    altered(path, "UPDATE meta SET value = 'x' WHERE key = 'last'")
    with RecordReader.open(path) as reader:
        assert reader.verify()[0].position == 0
    with pytest.raises(LogCorrupt, match="not a number"):
        RecordFile.open(path)


@pytest.mark.parametrize("opened", [RecordReader.open, RecordFile.open])
@pytest.mark.parametrize(
    "content", [b"{}\n" * 2000, b"SQLite format 3\0" + bytes(5000), b"x" * 50], ids=["text", "zeros", "short"]
)
def test_what_is_no_database_is_refused_by_name(
    path: Path, content: bytes, opened: Callable[[Path], RecordReader]
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(LogCorrupt) as caught:
        opened(path)
    assert str(path) in str(caught.value) and caught.value.position == 0
    assert path.read_bytes() == content


@pytest.mark.parametrize("opened", [RecordReader.open, RecordFile.open])
def test_a_foreign_database_is_refused_and_left_alone(path: Path, opened: Callable[[Path], RecordReader]) -> None:
    path.parent.mkdir()
    altered(path, "CREATE TABLE theirs (a)")
    with pytest.raises(LogCorrupt, match="not a record file of rolloutctl"):
        opened(path)


@pytest.mark.parametrize("opened", [RecordReader.open, RecordFile.open])
def test_a_file_of_a_newer_format_is_refused_with_what_to_do(
    path: Path, opened: Callable[[Path], RecordReader]
) -> None:
    made(path, 1)
    altered(path, "UPDATE meta SET value = '2' WHERE key = 'format'")
    with pytest.raises(LogError, match="format 2; this one reads up to 1. Update"):
        opened(path)


def test_a_missing_file_can_not_be_read_and_an_empty_one_holds_nothing(path: Path) -> None:
    with pytest.raises(LogError, match="no such file"):
        RecordReader.open(path)
    path.parent.mkdir()
    path.touch()
    with pytest.raises(LogCorrupt):
        RecordReader.open(path)
    found, error = readable(made(path, 3))
    assert (len(found), error) == (3, None)


def test_a_file_cut_off_anywhere_yields_only_what_was_recorded(path: Path) -> None:
    whole = made(path, 1000).read_bytes()
    lengths = []
    for size in range(0, len(whole), 1500):
        path.write_bytes(whole[:size])
        found, error = readable(path)
        assert error is not None
        assert found == [record(position) for position in range(1, len(found) + 1)]
        lengths.append(len(found))
    assert lengths[-1] > 900, "most of it is before the cut"
    assert lengths == sorted(lengths)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_never_read_as_data(path: Path, seed: int) -> None:
    whole = made(path, 400).read_bytes()
    chance = random.Random(seed)
    for _ in range(100):
        place = chance.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])
        try:
            found, error = readable(path)
        except LogError:
            continue
        assert found == [record(position) for position in range(1, len(found) + 1)]
        assert len(found) == 400 or error is not None
