"""Lines of CSV: quoted as they must be, and nothing that a spreadsheet computes."""

import pytest

from compaction_proxy.admin.api.overview import format_csv_line


@pytest.mark.parametrize(
    ("values", "written"),
    [
        (["=1+1", "+a", "-b", "@c", "\td", "\re", "\nf"], "'=1+1,'+a,'-b,'@c,'\td,\"'\re\",\"'\nf\"\r\n"),
        (['say "a, b"', "two\nlines", None, -0.5, 3], '"say ""a, b""","two\nlines",,-0.5,3\r\n'),
    ],
)
def test_a_cell_is_quoted_and_no_formula(values: list[object], written: str) -> None:
    assert format_csv_line(values) == written
