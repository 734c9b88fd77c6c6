import pytest
from trained import Trained, trained


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(tmp_path_factory.mktemp("learned"))
