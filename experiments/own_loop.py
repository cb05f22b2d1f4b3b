"""An ordinary PyTorch training loop, made decentralized: `torchrun --nproc-per-node 4 -m experiments.own_loop`."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import gossip
import graphs


def main() -> None:
    """Four workers on a ring, each with a quarter of the digits, exchanging a tenth of the coordinates per step."""
    transport = gossip.connect()
    rank, size = transport.rank, transport.size

    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x, y = (x / 16).float(), y.long()
    train = TensorDataset(x[:1500][rank::size], y[:1500][rank::size])
    loader = DataLoader(
        train, batch_size=32, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(rank)
    )

    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = gossip.wrap(
        optimizer, gossip.Choco(compressor=gossip.TopK(0.1), gamma=0.2), graphs.ring(size), transport=transport
    )

    for _ in range(10):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()

    distance = optimizer.consensus_distance()
    with optimizer.average_model(), torch.no_grad():
        accuracy = float((model(x[1500:]).argmax(1) == y[1500:]).float().mean())
    if rank == 0:
        print(f"average model: accuracy {accuracy:.3f}, consensus distance {distance:.2g}, {optimizer.rounds} rounds")
    gossip.disconnect()


if __name__ == "__main__":
    main()
