import pytest

from support import keepers, small_pipelines
from tritium.pipelines import sharing


@pytest.fixture(scope="module")
def runtime():
    with keepers.runtime_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def flux():
    return small_pipelines.flux()


@pytest.fixture(scope="module")
def keeper(runtime, flux):
    with sharing.keeper("small") as found:
        found.publish(flux)
        yield found
