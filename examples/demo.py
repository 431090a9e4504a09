"""A stock FLUX transformer, run eagerly, under plain torch.compile and under Tritium.

    python examples/demo.py [--seconds 15]

It needs no download: the weights are random. On a CPU the model is small (two blocks of each kind, 320 tokens) and
the demo takes one to two minutes, most of it in the C++ compiler; on a GPU it has the width and tokens of FLUX.1-dev.
"""

import argparse

import tritium
from tritium import device
from tritium.bench import run
from tritium.bench.results import Results
from tritium.bench.workloads import FLUX
from tritium.cli import progress, table


def main(seconds: float = 15.0) -> None:
    settings = run.Settings(seconds=seconds, device_type=device.default())
    with progress.shown() as notify:
        outcome = run.run(FLUX, settings, notify)
    table.show(Results.now(outcome.rows, settings.device_type))
    print(tritium.explain(outcome.models["tritium"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="how long the three variants take turns")
    main(parser.parse_args().seconds)
