"""Train a small ResNet on handwritten digits under many plans: the same accuracy under every one of them.

Batch norm sees the samples of a micro-batch, so plans with micro-batches are other mathematics and reach
another accuracy, by luck better or worse. Here groups of channels are normalised: all plans do that alike.

python examples/digits.py                 all plans, each on the local ranks that it needs
python examples/digits.py --epochs 1 --plans "data=2" "stages=2 schedule=gems-mast"
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import shardwise as sw
from shardwise.graph import TensorSpec
from shardwise.training.named_data import named_data

PLANS = (
    "data=1",
    "data=2",
    "spatial=2x1",
    "filter=2",
    "stages=2 micro_batches=2",
    "stages=2 schedule=gems-mast",
    "data=2 stages=2x1|1 schedule=1f1b micro_batches=2",
)


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == target).double().mean()


def sgd(named) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9, weight_decay=5e-4)


def double(data: Dataset) -> TensorDataset:
    """Return a dataset in float64: then plans with the same mathematics see the same digits the same way."""
    images, targets = default_collate([data[i] for i in range(len(data))])
    return TensorDataset(images.double(), targets)


def by_groups(model: nn.Module) -> nn.Module:
    """Replace batch norms by norms over groups of two channels."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(child.num_features // 2, child.num_features))
    return model


def train(plan: str, epochs: int) -> sw.History:
    torch.manual_seed(0)
    model = by_groups(sw.zoo.build("resnet8", num_classes=10)).double()
    outputs = TensorSpec((2, 10), "float64")
    train_data, test_data = (double(data) for data in named_data("digits", outputs, 0))
    return sw.fit(
        model,
        train_data,
        loss=nn.CrossEntropyLoss(),
        optimizer=sgd,
        batch_size=64,
        epochs=epochs,
        plan=plan,
        ranks=sw.Plan.parse(plan).ranks,
        validation=test_data,
        metrics=[accuracy],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs),
        progress=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--plans", nargs="*", default=PLANS)
    options = parser.parse_args()
    print(f"{'plan':50} ranks  loss    accuracy  seconds/epoch")
    for plan in options.plans:
        history = train(plan, options.epochs)
        last = history.epochs[-1]
        accuracy_percent = 100 * last["val_accuracy"]
        print(
            f"{plan:50} {history.ranks:5}  {last['loss']:.4f} {accuracy_percent:8.2f}%  {last['seconds']:.2f}"
        )


if __name__ == "__main__":
    main()
