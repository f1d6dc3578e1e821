import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--runslow"):
        return
    skipped = pytest.mark.skip(reason="slow: needs --runslow")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skipped)
