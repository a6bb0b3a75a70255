"""Damage to a record file is found and named, never read as data, and everything before it stays readable."""

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from schemas.errors import LogCorrupt, LogError
from schemas.storage.database import FORMAT
from schemas.storage.record_file import RecordFile
from schemas.storage.records import Record, RecordReader
from tests.unit.record_files import records, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "log.sqlite"


opened = pytest.mark.parametrize("opened", [RecordReader.open, RecordFile.open])


def alter(path: Path, *statements: str) -> None:
    """Change the database of a record file without its checks."""
    for statement in statements:
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute(statement)
        connection.close()


def readable(path: Path) -> tuple[list[Record], LogCorrupt | None]:
    """The records that can be read, and the damage that ended reading."""
    found: list[Record] = []
    try:
        with RecordReader.open(path) as reader:
            found.extend(record for record in reader.records())
    except LogCorrupt as error:
        return found, error
    return found, None


def assert_damaged(path: Path, position: int) -> LogCorrupt:
    """Check that all records before a position are read, and that the error names it."""
    found, error = readable(path)
    assert found == records(1, position - 1)
    assert error is not None and error.position == position
    return error


def test_a_changed_record_ends_reading_after_all_before_it(path: Path) -> None:
    write(path, 500)
    alter(path, "UPDATE records SET at_ns = at_ns + 1 WHERE position = 400")
    error = assert_damaged(path, 400)
    assert str(path) in str(error) and "record 400" in str(error) and "Records 1 to 399 are readable" in str(error)
    with RecordReader.open(path) as reader:
        assert list(reader.records(401)) == records(401, 500)


@pytest.mark.parametrize("column", ["position", "at_ns", "kind", "agent", "body", "checksum"])
def test_the_checksum_covers_every_column(path: Path, column: str) -> None:
    write(path, 20)
    change = {
        "position": "position = -position",
        "kind": "kind = kind || 'x'",
        "agent": "agent = '9'",
        "body": "body = CAST(body || 'x' AS BLOB)",
    }.get(column, f"{column} = {column} + 1")
    alter(path, f"UPDATE records SET {change} WHERE position = 20")
    assert_damaged(path, 20)


@pytest.mark.parametrize("value", ["NULL", "7", "'text'", "CAST(x'ff' AS TEXT)", "zeroblob(100)"])
@pytest.mark.parametrize("column", ["body", "kind", "at_ns", "checksum"])
def test_a_value_of_another_type_is_damage(path: Path, column: str, value: str) -> None:
    write(path, 20)
    alter(
        path,
        "UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '')",
        f"UPDATE records SET {column} = {value} WHERE position = 20",
    )
    assert_damaged(path, 20)


def test_a_hole_is_named_and_the_records_behind_it_can_be_read(path: Path) -> None:
    write(path, 50)
    alter(path, "DELETE FROM records WHERE position IN (1, 30)")
    assert "No record before it" in str(assert_damaged(path, 1))
    with RecordReader.open(path) as reader:
        assert list(reader.records(31)) == records(31, 50)
        with pytest.raises(LogCorrupt, match="record 30 is missing; the next one is 31"):
            list(reader.records(2))


def test_a_missing_end_is_found_by_readers_and_the_writer(path: Path) -> None:
    write(path, 50)
    alter(path, "DELETE FROM records WHERE position > 40")
    assert_damaged(path, 41)
    with pytest.raises(LogCorrupt, match="ends with 40"):
        RecordFile.open(path)


def killed(path: Path, last: int, noted: int) -> Path:
    """Write a file with records up to a position, as a killed writer leaves it: `last` is behind."""
    alter(write(path, last), f"UPDATE meta SET value = '{noted}' WHERE key = 'last'")
    return path


def test_a_file_whose_end_was_not_noted_ends_with_its_last_record(path: Path) -> None:
    killed(path, 50, noted=20)
    assert readable(path) == (records(1, 50), None)
    with RecordReader.open(path) as reader:
        assert reader.last_position == 50
    with RecordFile.open(path) as file:
        assert file.last_position == 50
    alter(path, "DELETE FROM records WHERE position > 40")
    assert_damaged(path, 41)


def test_of_a_killed_writer_a_missing_end_is_found_up_to_what_was_noted(path: Path) -> None:
    killed(path, 50, noted=20)
    alter(path, "DELETE FROM records WHERE position > 18")
    assert_damaged(path, 19)
    with pytest.raises(LogCorrupt, match="ends with 18"):
        RecordFile.open(path)


def test_damage_in_records_after_the_noted_end_is_found(path: Path) -> None:
    killed(path, 50, noted=20)
    alter(path, "UPDATE records SET at_ns = 7 WHERE position IN (40, 50)")
    assert_damaged(path, 40)
    with pytest.raises(LogCorrupt, match="record 50 does not match"):
        RecordFile.open(path)


def test_a_damaged_header_is_reported_and_the_records_stay_readable(path: Path) -> None:
    write(path, 20)
    alter(path, "UPDATE meta SET value = '2' WHERE key = 'logic'")
    with RecordReader.open(path) as reader:
        with pytest.raises(LogCorrupt, match="header does not match"):
            _ = reader.header
        assert list(reader.records()) == records(1, 20)


@opened
def test_damaged_bounds_are_damage(path: Path, opened: Callable[[Path], RecordReader]) -> None:
    write(path, 20)
    alter(path, "UPDATE meta SET value = 'x' WHERE key = 'last'")
    with pytest.raises(LogCorrupt, match="not a number") as caught, opened(path) as reader:
        list(reader.records())
    assert caught.value.position == 0


@opened
@pytest.mark.parametrize(
    "content", [b"{}\n" * 2000, b"SQLite format 3\0" + bytes(5000), b"x" * 50], ids=["text", "zeros", "short"]
)
def test_a_file_that_is_not_a_database_is_refused_by_name(
    path: Path, content: bytes, opened: Callable[[Path], RecordReader]
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(LogCorrupt) as caught:
        opened(path)
    assert str(path) in str(caught.value) and caught.value.position == 0
    assert path.read_bytes() == content


@opened
def test_another_database_is_refused(path: Path, opened: Callable[[Path], RecordReader]) -> None:
    path.parent.mkdir()
    alter(path, "CREATE TABLE other (a)")
    with pytest.raises(LogCorrupt, match="not a record file of rolloutctl"):
        opened(path)


@opened
@pytest.mark.parametrize("other", [FORMAT - 1, FORMAT + 1])
def test_a_file_of_another_format_is_refused_with_advice(
    path: Path, opened: Callable[[Path], RecordReader], other: int
) -> None:
    write(path, 1)
    alter(path, f"UPDATE meta SET value = '{other}' WHERE key = 'format'")
    with pytest.raises(LogError, match=f"in format {other}; this one reads format {FORMAT}. Use the version that"):
        opened(path)


def test_a_missing_file_cannot_be_read_and_an_empty_one_holds_nothing(path: Path) -> None:
    with pytest.raises(LogError, match="no such file"):
        RecordReader.open(path)
    path.parent.mkdir()
    path.touch()
    with pytest.raises(LogCorrupt):
        RecordReader.open(path)
    assert readable(write(path, 3)) == (records(1, 3), None)


def test_a_file_cut_off_anywhere_yields_only_what_was_recorded(path: Path) -> None:
    whole = write(path, 1000).read_bytes()
    lengths = []
    for size in range(0, len(whole), 1500):
        path.write_bytes(whole[:size])
        found, error = readable(path)
        assert error is not None
        assert found == records(1, len(found))
        lengths.append(len(found))
    assert lengths[-1] > 900, "most of it is before the cut"
    assert lengths == sorted(lengths)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits_are_never_read_as_data(path: Path, seed: int) -> None:
    whole = write(path, 400).read_bytes()
    chance = random.Random(seed)
    for _ in range(100):
        place = chance.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << chance.randrange(8)]) + whole[place + 1 :])
        try:
            found, error = readable(path)
        except LogError:
            continue
        assert found == records(1, len(found))
        assert len(found) == 400 or error is not None
