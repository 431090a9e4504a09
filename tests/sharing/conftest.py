import pytest

from support import keepers, small_pipelines
from tritium.pipelines import sharing


@pytest.fixture(scope="module")
def runtime():
    with keepers.runtime_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def flux():
    pipe = small_pipelines.flux(1, 1)
    pipe.text_encoder_2.encoder.embed_tokens.weight = pipe.text_encoder_2.shared.weight
    return pipe


@pytest.fixture(scope="module")
def image(flux):
    return small_pipelines.generate(flux)


@pytest.fixture(scope="module")
def keeper(runtime, flux):
    with sharing.keeper("small") as found:
        found.publish(flux)
        yield found
