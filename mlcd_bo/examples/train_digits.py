"""An ordinary DDP training script on scikit-learn's digits, with the one line mlcd_bo needs.

Runs alone, too:  torchrun --nproc-per-node=2 train_digits.py --data digits.npz --epochs 20
where digits.npz holds `images` (n x 64, 0 to 16) and `labels` (n).
"""

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mlcd_bo


def main() -> None:
    """Trains a small convolutional network; the global batch stays the same on any world size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="npz file with images and labels")
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=256, help="global batch size")
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = np.load(args.data, allow_pickle=False)
    images = torch.tensor(digits["images"], dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(images, torch.tensor(digits["labels"]))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(
        data, batch_size=args.batch // dist.get_world_size(), sampler=sampler, drop_last=True
    )
    width = args.width
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * 64, 10),
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            mlcd_bo.step(len(batch))
        if dist.get_rank() == 0 and (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
