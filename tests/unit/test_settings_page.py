"""docs/settings.md has every setting, as the code has it now."""

from tests.settings import PAGE, TABLES, written


def test_the_page_has_every_setting_as_it_is_now() -> None:
    page = PAGE.read_text("utf-8")
    assert all(f"<!-- table: {name} -->" in page for name in TABLES)
    assert written(page) == page, "run `python -m tests.settings`"
