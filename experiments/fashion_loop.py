"""Fashion-MNIST in an ordinary loop that survives being killed: start it again, and it goes on where it was.

torchrun --nproc-per-node 4 -m experiments.fashion_loop --out runs/fashion --epochs 4 --samples 6000
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import gossip
import graphs
from experiments import models
from experiments.tasks.fashion import load

CHECKPOINT, CURVE = "checkpoint.pt", "curve.jsonl"


def main() -> None:
    """Every worker trains a CNN on its share of the images; rank 0 keeps the curve of the average model."""
    options = _options()
    transport = gossip.connect()
    rank, size = transport.rank, transport.size
    torch.manual_seed(0)

    (x, y), (x_test, y_test) = load()
    x, y = x[: options.samples][rank::size], y[: options.samples][rank::size]
    x_test, y_test = x_test[: options.test_samples], y_test[: options.test_samples]
    batches = len(x) // options.batch

    model = models.cnn(784, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = gossip.wrap(
        optimizer,
        gossip.Choco(compressor=gossip.TopK(options.ratio), gamma=options.gamma),
        graphs.ring(size),
        transport=transport,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * batches)

    saved = gossip.load(options.out / CHECKPOINT, optimizer, optional=True) or {"schedule": None, "seconds": 0.0}
    if saved["schedule"]:
        schedule.load_state_dict(saved["schedule"])
    if rank == 0:
        _forget_after(options.out / CURVE, optimizer.steps)
        print(f"begins at step {optimizer.steps} of {options.epochs * batches}", flush=True)
    seconds, began = saved["seconds"], time.perf_counter()

    while optimizer.steps < options.epochs * batches:
        epoch, batch = divmod(optimizer.steps, batches)
        generator = torch.Generator().manual_seed(int(gossip.rng.key(0, "order", epoch, rank)))
        order = torch.randperm(
            len(x), generator=generator
        )  # a function of the epoch, so there is nothing to save of it
        pick = order.split(options.batch)[batch]
        optimizer.zero_grad()
        loss = cross_entropy(model(x[pick] / 255), y[pick])
        loss.backward()
        optimizer.step()
        schedule.step()

        if optimizer.steps % options.every == 0 or optimizer.steps == options.epochs * batches:
            seconds, began = seconds + time.perf_counter() - began, time.perf_counter()
            distance = optimizer.consensus_distance()
            mean_loss = float(transport.sum_(loss.detach().clone())) / size
            with optimizer.average_model(), torch.no_grad():  # on every rank; one evaluates
                accuracy = float((model(x_test / 255).argmax(1) == y_test).float().mean()) if rank == 0 else 0.0
            if rank == 0:
                row = {"step": optimizer.steps, "epoch": optimizer.steps / batches, "accuracy": accuracy}
                row |= {"loss": mean_loss, "consensus": distance, "seconds": seconds}
                row["megabytes"] = float(optimizer.net.meter.bits.sum()) / 8e6  # sent by this worker
                with (options.out / CURVE).open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print("  ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
            gossip.save(options.out / CHECKPOINT, optimizer, schedule=schedule.state_dict(), seconds=seconds)
    gossip.disconnect()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/fashion"), help="folder of checkpoint and curve")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=60_000, help="training images, shared out among the workers")
    parser.add_argument("--test-samples", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=32, help="per worker")
    parser.add_argument("--every", type=int, default=25, help="steps between evaluations and checkpoints")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--ratio", type=float, default=0.1, help="share of the coordinates that travel")
    parser.add_argument("--gamma", type=float, default=0.2, help="consensus step size")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def _forget_after(path: Path, step: int) -> None:
    """Cut off what a killed run wrote of the curve after its last checkpoint."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    path.write_text("".join(kept))


if __name__ == "__main__":
    main()
