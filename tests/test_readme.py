"""The parts of one's own that the README shows work as they stand."""

import re
from pathlib import Path

import pytest
import torch

import gossip
import graphs

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def shown():
    """What the code blocks of the section define."""
    section = README.read_text().partition("## Your own algorithm")[2].partition("\n## ")[0]
    names: dict = {"__name__": "readme"}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block, names)
    return names


def test_every_choice_of_every_group_is_named():
    table = README.read_text().partition("| group | choices |")[2].partition("\n\n")[0]
    conf = Path(__file__).parents[1] / "experiments" / "conf"
    files = {file.relative_to(conf) for file in conf.rglob("*.yaml")} - {Path("train.yaml")}
    assert not [
        str(file)
        for file in sorted(files)
        if file.parts[0] != "hydra"
        and not (re.search(rf"\b{file.stem}\b", table) and f"`{file.parent.as_posix()}`" in table)
    ]


def test_an_algorithm_of_ones_own_is_dpsgd(shown):
    b = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ends = []
    for algorithm in (shown["DPSGD"](), gossip.DPSGD()):
        (*_, last) = gossip.simulate(
            lambda x, workers, step: x - b[workers],
            algorithm,
            graphs.ring(6),
            30,
            x0=torch.zeros(4, dtype=torch.float64),
        )
        ends.append(last.x.clone())
    assert torch.equal(*ends)


def test_a_compressor_of_ones_own_in_choco(shown):
    x = torch.randn(8, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    compressor = shown["RandomBlock"](100)
    y, distance = gossip.consensus(x, graphs.ring(8), 400, compressor=compressor, gamma=0.1, history=True)
    assert torch.allclose(y.mean(0), x.mean(0), atol=1e-12)
    assert distance[-1] < 0.05 * distance[0]
    errors = [
        float((compressor(x, gossip.rng.key(k, "test", torch.arange(8))).dense() - x).square().sum())
        for k in range(300)
    ]
    assert sum(errors) / 300 == pytest.approx((1 - compressor.delta(600)) * float(x.square().sum()), rel=0.03)


def test_a_compressor_that_makes_no_payload_is_refused():
    class Wrong:
        gamma = 0.5

        def __call__(self, x, key=None):
            return x

    with pytest.raises(TypeError, match=r"Wrong made a Tensor, and a compressor makes a gossip.Payload"):
        gossip.consensus(torch.randn(4, 3), graphs.ring(4), 2, compressor=Wrong(), gamma=0.5)
