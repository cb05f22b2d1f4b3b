"""`make bench`: every benchmark, one table."""

import sys

from . import asynchronous, compress, cost, engine, hosts, spectra, training, wire
from .harness import table

GROUPS = {
    "asynchronous": asynchronous,
    "compress": compress,
    "cost": cost,
    "engine": engine,
    "hosts": hosts,
    "spectra": spectra,
    "training": training,
    "wire": wire,
}


def main(wanted: list[str]) -> None:
    """Run the named groups, or all."""
    unknown = set(wanted) - GROUPS.keys()
    if unknown:
        sys.exit(f"error: no benchmark group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    print(table([row for name in wanted or GROUPS for row in GROUPS[name].rows()]))


if __name__ == "__main__":
    main(sys.argv[1:])
