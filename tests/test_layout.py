"""The flat layout: parameters as one row and back, without a copy (gossip/layout.py)."""

import pytest
import torch
from torch import nn

from gossip import Layout


class Net(nn.Module):
    """A scalar, a tied weight, a transposed and a channels-last parameter."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.first = nn.Linear(5, 6, bias=False)
        self.second = nn.Linear(5, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).T)


def test_names_and_order_are_those_of_the_module_and_tied_parameters_occur_once():
    net, layout = Net(), Layout.of(Net())
    assert layout.names == tuple(name for name, _ in net.named_parameters())
    assert "second.weight" not in layout.names
    assert layout.d == sum(p.numel() for p in net.parameters()) == 4 * 3 * 4 + 4 + 30 + 6 + 1 + 6
    assert layout.shapes[layout.names.index("scale")] == torch.Size([])


def test_flatten_and_views_are_inverse_whatever_the_memory_format():
    net = Net()
    layout = Layout.of(net)
    flat = layout.flatten(net)
    assert flat.shape == (layout.d,)
    assert not flat.requires_grad
    for name, view in layout.views(flat).items():
        assert torch.equal(view, net.get_parameter(name)), name
    assert torch.equal(layout.flatten(layout.views(flat).items()), flat)


def test_views_are_views_of_every_row():
    layout = Layout.of(Net())
    rows = torch.arange(3.0 * layout.d).view(3, layout.d)
    views = layout.views(rows)
    assert [tuple(v.shape) for v in views.values()] == [(3, *s) for s in layout.shapes]
    everything = torch.cat([v.reshape(3, -1) for v in views.values()], 1)
    assert torch.equal(everything.sort(1).values, rows)  # a parameter stored in another order keeps it
    views["scale"][1] = -7
    assert int((rows == -7).sum()) == 1
    deep = layout.views(rows.view(1, 3, layout.d))
    assert deep["first.weight"].shape == (1, 3, 6, 5)


def test_flatten_writes_into_a_given_row():
    net = nn.Linear(2, 2)
    out = torch.full((3, 6), -1.0)
    result = Layout.of(net).flatten(net, out[1])
    assert result.data_ptr() == out[1].data_ptr()
    assert torch.equal(out[1], torch.cat([net.weight.detach().flatten(), net.bias.detach()]))
    assert bool((out[[0, 2]] == -1).all())


def test_pairs_of_names_and_tensors_have_a_layout_too():
    layout = Layout.of([("a", torch.zeros(2, dtype=torch.float64)), ("b", torch.zeros(1, 3, dtype=torch.float64))])
    assert (layout.names, layout.sizes, layout.dtype) == (("a", "b"), (2, 3), torch.float64)


def test_mixed_dtypes_are_refused_by_name():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    with pytest.raises(ValueError, match=r"'0.*float32.*'1.*float64.*convert the model"):
        Layout.of(model)


def test_a_model_without_parameters_and_a_row_of_another_length_are_refused():
    with pytest.raises(ValueError, match="no parameters"):
        Layout.of(nn.ReLU())
    with pytest.raises(ValueError, match="'weight' has no shape yet: call the lazy model"):
        Layout.of(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="row of 5 numbers does not fit this layout of 6"):
        Layout.of(nn.Linear(2, 2)).views(torch.zeros(2, 5))
